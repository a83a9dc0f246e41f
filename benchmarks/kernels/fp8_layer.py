"""The kernels between the FP8 linears of a layer: each by itself, and fused with quantization.

    python -m benchmarks.kernels.fp8_layer [--out benchmarks/results/fp8_layer_h200]

Graphs of 32 layers of Llama-3-8B's shape with heads of (96, 64), with their linears and without.
Attention is left out: what o_proj reads is there beforehand.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm import _custom_ops as ops

from benchmarks.common.page import measure_rows
from vllm_gac.kernels import fp8_rows
from vllm_gac.profiling.timing import microseconds

LAYERS, HIDDEN, EPS = 32, 4096, 1e-5
QKV, ATTENDED = 32 * 96 + 8 * (96 + 64), 32 * 64
WIDTHS = (11520, 14336)
TOKENS = (1, 8, 16, 32, 64, 256, 2048)
FP8 = torch.float8_e4m3fn

Quantized = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Measure all widths and numbers of tokens."""
    title = "What is between the FP8 linears of a layer"
    about = (
        "Microseconds of a layer in a CUDA graph of 32 layers. `apart`: norm, SwiGLU and four "
        "quantizations, seven\nkernels of vLLM's. `vLLM's norm`: its kernel that norms and "
        "quantizes, and the others apart. `fused`: ours, two of\nnorm and quantization, one of "
        "SwiGLU and quantization, one of quantization. `layer`: with the four linears,\nCUTLASS's "
        "as vLLM calls it. `difference`: of the last outputs, fused against apart, relative."
    )
    measure_rows(__doc__, "benchmarks.kernels.fp8_layer", title, about, _rows())


class Layer:
    """The linears of a layer, and what its kernels read and write."""

    def __init__(self, width: int) -> None:
        shapes = ((QKV, HIDDEN), (HIDDEN, ATTENDED), (2 * width, HIDDEN), (HIDDEN, width))
        self.weights = [_random_fp8(*shape).t() for shape in shapes]
        self.scale = torch.full((1,), 1 / 448, device="cuda")
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def linear(self, index: int, x: Quantized) -> torch.Tensor:
        """The linear of this index: q, k and v; o; gate and up; down."""
        numbers, scale = x
        weight = self.weights[index]
        return ops.cutlass_scaled_mm(numbers, weight, scale, self.scale, torch.bfloat16)


class Apart:
    """vLLM's kernels, as models that are not compiled run them."""

    def normed(self, x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> Quantized:
        """RMSNorm of the sum."""
        torch.ops._C.fused_add_rms_norm(x, residual, layer.norm, EPS)
        return self.quantized(x)

    def gated(self, gate_up: torch.Tensor) -> Quantized:
        """SwiGLU."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return self.quantized(out)

    def quantized(self, x: torch.Tensor) -> Quantized:
        """The numbers in e4m3, and scales by token."""
        return ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)


class VllmsNorm(Apart):
    """The same with vLLM's kernel that norms and quantizes."""

    def normed(self, x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> Quantized:
        return ops.rms_norm_dynamic_per_token_quant(x, layer.norm, EPS, FP8, residual=residual)


class Fused(Apart):
    """Ours."""

    def normed(self, x: torch.Tensor, residual: torch.Tensor, layer: Layer) -> Quantized:
        return fp8_rows.normed(x, residual, layer.norm, EPS)

    def gated(self, gate_up: torch.Tensor) -> Quantized:
        return fp8_rows.gated(gate_up)

    def quantized(self, x: torch.Tensor) -> Quantized:
        return fp8_rows.quantized(x)


def _rows() -> Iterator[dict[str, Any]]:
    for width in WIDTHS:
        layers = [Layer(width) for _ in range(LAYERS)]
        for tokens in TOKENS:
            yield {"width": width, "tokens": tokens} | _measure(layers, tokens, width)


def _measure(layers: list[Layer], tokens: int, width: int) -> dict[str, Any]:
    x, residual, attended, gate_up = (
        torch.randn(tokens, columns, device="cuda").bfloat16()
        for columns in (HIDDEN, HIDDEN, ATTENDED, 2 * width)
    )

    def small(way: Apart) -> None:
        for layer in layers:
            way.normed(x, residual, layer)
            way.quantized(attended)
            way.normed(x, residual, layer)
            way.gated(gate_up)

    def whole(way: Apart, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            layer.linear(0, way.normed(x, residual, layer))
            x = layer.linear(1, way.quantized(attended))
            x = layer.linear(2, way.normed(x, residual, layer))
            x = layer.linear(3, way.gated(x))
        return x

    ways = {"apart": Apart(), "vLLM's norm": VllmsNorm(), "fused": Fused()}
    times: dict[str, Any] = {}
    for name, way in ways.items():
        times[name] = _of_a_layer(functools.partial(small, way))
    for name, way in ways.items():
        times[f"layer, {name}"] = _of_a_layer(functools.partial(whole, way, x, residual))
    given = torch.randn_like(x), torch.randn_like(x)
    apart, fused = (
        whole(ways[name], *(tensor.clone() for tensor in given)).float()
        for name in ("apart", "fused")
    )
    return times | {"difference": f"{float((fused - apart).norm() / apart.norm()):.1e}"}


def _of_a_layer(all_layers: Callable[[], object]) -> float:
    return round(microseconds(all_layers, 1) / LAYERS, 2)


def _random_fp8(rows: int, columns: int) -> torch.Tensor:
    """Random numbers in e4m3, that a scale of 1 / 448 makes a linear's."""
    return (torch.randn(rows, columns, device="cuda") * 448 / columns**0.5).to(FP8)


if __name__ == "__main__":
    main()
