"""The experiments of "When Smaller Is Slower" (Xin et al., 2026), repeated on this GPU.

One command each, `python -m benchmarks.paper.NAME`; what they found on an H200 is told in
benchmarks/results/seeds/README.md.

    sdpa_staircase     figure 3         attention latency over head sizes
    sdpa_backends      tables 1, 2      which attention backends take which head sizes, how fast
    gemm_alignment     tables 4, 6      GEMM throughput over K and N
    padding_rescue     table 5          what padding with zeros costs and gives back
    repair_tradeoff    tables 7, 8, 9   minimal, optimal and predefined repair of PaLU's head sizes
    palu_distribution  figure 2         ranks before and after aligned selection (on a CPU)
    hardware_counters  table 3          tensor cores, L2 sectors, bandwidth, load width (with ncu)
"""
