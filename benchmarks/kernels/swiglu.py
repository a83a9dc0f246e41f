"""Gate, up and SwiGLU of a few tokens: our kernel, against cuBLAS and vLLM's activation.

    python -m benchmarks.kernels.swiglu [--out benchmarks/results/swiglu_h200]

Measures everything in one run; weights are read from memory, never from the L2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear
from vllm import _custom_ops  # noqa: F401 -- brings torch.ops._C

from benchmarks.common.page import measure_rows
from vllm_gac.kernels.swiglu import is_faster, swiglu_linear
from vllm_gac.profiling.timing import copy_bandwidth
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn

TOKENS = (1, 2, 4, 8, 16, 24, 32)
# Features and width: Llama-3-8B dense, compressed, and the part on one of several GPUs; smaller and
# larger models.
MLPS = ((14336, 4096), (12288, 4096), (11520, 4096), (10240, 4096), (5760, 4096),
        (2880, 4096), (6912, 2048), (22528, 8192))  # fmt: skip


def main() -> None:
    """Measure all MLPs."""
    title = "Gate, up and SwiGLU of a few tokens"
    about = (
        "Microseconds in a CUDA graph; bf16. `bytes` is the time to read the weights at the copy "
        "bandwidth\nof this run. `features` is the MLP's width, `width` the model's hidden "
        "size;\n"
        "`served` says whether our kernel serves a gac model (no quantization, LoRA or biases, not "
        "compiled)."
    )
    measure_rows(__doc__, "benchmarks.kernels.swiglu", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    for features, width in MLPS:
        copies = copies_past_l2(4 * features * width)
        shape = (2 * features, width)
        weights = [torch.randn(shape, device="cuda").bfloat16() for _ in range(copies)]
        for tokens in TOKENS:
            row = {"features": features, "width": width, "tokens": tokens}
            yield row | _measure(weights, tokens, bandwidth)


def _measure(weights: list[torch.Tensor], tokens: int, bandwidth: float) -> dict[str, object]:
    features, width = weights[0].shape[0] // 2, weights[0].shape[1]
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    activated = torch.empty(tokens, features, dtype=x.dtype, device="cuda")

    def stock(weight: torch.Tensor) -> None:
        torch.ops._C.silu_and_mul(activated, linear(x, weight))

    ours = microseconds_in_turn(lambda weight: swiglu_linear(x, weight), weights)
    gemm = microseconds_in_turn(lambda weight: linear(x, weight), weights)
    both = microseconds_in_turn(stock, weights)
    return {
        "bytes": round(weights[0].nbytes / bandwidth / 1e6, 1),
        "ours": round(ours, 1),
        "cuBLAS alone": round(gemm, 1),
        "cuBLAS, vLLM": round(both, 1),
        "cuBLAS, vLLM / ours": round(both / ours, 2),
        "served": "yes" if is_faster(x, weights[0]) else "no",
    }


if __name__ == "__main__":
    main()
