"""The paper's numbers, from an A100-80GB (PyTorch 2.9.1, CUDA 12.8, FlashAttention 2.7.4).

The paper is Xin et al., "When Smaller Is Slower: Dimensional Collapse in Compressed LLMs", 2026.
Where it has only a plot or a summary, the numbers are from the authors' repository
https://github.com/JihaoXin/GAC (report.md, scripts/run_c4_dimension_repair.py).
"""

# Figure 3 in numbers (report.md, 1.2), ms by head size.
STAIRCASE = {64: 0.826, 96: 1.140, 104: 1.551, 107: 2.147, 112: 1.545, 120: 1.603, 128: 1.485}
# Section 4.1: means over head sizes 104 to 128.
STAIRCASE_MEANS = {"multiples of 8": 1.55, "others": 2.03}

# Table 1 (120: report.md, 1.3), ms by backend and head size; None is a refusal.
BACKENDS: dict[str, dict[int, float | None]] = {
    "AUTO": {96: 1.17, 104: 1.54, 107: 2.14, 112: 1.53, 120: 1.59, 128: 1.47},
    "FLASH": {96: 1.12, 104: 1.54, 107: 2.14, 112: 1.53, 120: 1.59, 128: 1.47},
    "MEM_EFFICIENT": {96: 2.38, 104: 2.75, 107: None, 112: 2.60, 120: 2.93, 128: 2.55},
    "MATH": {96: 26.0, 104: 26.5, 107: 27.0, 112: 27.1, 120: 27.5, 128: 28.1},
}
# Table 2: (available, tried) of the multiples of 8, and of the others.
AVAILABILITY = {"FLASH": ((8, 8), (42, 42)), "MEM_EFFICIENT": ((8, 8), (0, 42))}

# Section 4.3, H1: TFLOP/s of (8192, 8192, K), K from 104 to 128.
SMALL_K = {"multiples of 16": "91.1", "multiples of 8": "76.8", "others": "37-40"}
# Table 4: TFLOP/s of (4096, 4096, K).
LOADS = {
    "float4, K % 16 == 0": ((112, 128), "73-83"),
    "float4, K % 8 == 0": ((104, 120), "68-77"),
    "float2, K % 4 == 0": ((108, 116), "61-71"),
    "scalar": ((105, 107), "39-40"),
}
# Table 6: ms of (4096, 4096, K).
GEMM_MS = {107: 0.089, 112: 0.050, 128: 0.050}

# Table 5: ms of attention with a head size of 107, padded.
PADDING = {107: 2.192, 112: 1.523, 128: 1.445}

# Llama-3-8B's 512 KV heads by the size that PaLU leaves at a ratio of 0.8
# (scripts/run_c4_dimension_repair.py; figure 2 is a plot of such a distribution).
PALU_HEADS = {
    114: 51, 116: 89, 117: 42, 118: 68, 120: 16, 121: 73, 122: 58, 123: 47, 124: 52, 125: 16,
}  # fmt: skip
# Table 7, percent.
OVERHEAD = {"minimal": 3.72, "optimal": 7.20}
# Table 8: ms of attention (original, minimal, optimal) by head size.
REPAIR = {
    107: (2.064, 1.490, 1.506),
    114: (2.049, 1.549, 1.432),
    117: (2.054, 1.567, 1.433),
    120: (1.557, 1.557, 1.428),
    121: (1.964, 1.430, 1.441),
    125: (1.975, 1.439, 1.439),
}
# Section 6.3: latency gained per memory spent.
ROI = {"minimal": 6.9, "optimal": 4.0}
