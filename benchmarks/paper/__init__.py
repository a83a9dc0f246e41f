"""The experiments of "When Smaller Is Slower" (Xin et al., 2026), repeated on this GPU.

Each is one command, `python -m benchmarks.paper.NAME`. benchmarks/results/seeds/README.md has the
results of an H200.

    sdpa_staircase     figure 3         attention latency over head sizes
    sdpa_backends      tables 1, 2      which attention backends take which head sizes; latency
    gemm_alignment     tables 4, 6      GEMM throughput over K and N
    padding_rescue     table 5          costs and gains of padding with zeros
    repair_tradeoff    tables 7, 8, 9   minimal, optimal and predefined repair of PaLU's head sizes
    palu_distribution  figure 2         ranks before and after aligned selection (on a CPU)
    hardware_counters  table 3          tensor cores, L2 sectors, bandwidth, load width (with ncu)
"""
