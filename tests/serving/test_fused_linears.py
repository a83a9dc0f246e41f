"""Which linears and MLPs our kernels compute, and that all are right without them."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import KernelConfig, LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import reload

from vllm_gac.kernels import silu_mul
from vllm_gac.kernels.skinny_gemm import launch as kernel
from vllm_gac.serving.model import fused_linears, linear
from vllm_gac.serving.model.fused_linears import FusedLinears
from vllm_gac.serving.model.linear import UpFactor, project, project_gated

SHAPES = ((6, 8), (4, 16), (5, 24))


class _Linear(nn.Module):
    """One of vLLM's linears, as far as it is called here."""

    def __init__(self, out_size: int, in_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_size, in_size), requires_grad=False)
        self.input_size = in_size

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.t(), None


class Quantized(UnquantizedLinearMethod):
    """A quantization method that derives from vLLM's for plain linears."""


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({}, {}),
        ({"method": Quantized}, {}),
        ({"bias": "bias"}, {}),
        ({}, {"kernel_config": KernelConfig(linear_backend="cutlass")}),
        ({"lora": LoRAConfig(max_lora_rank=8)}, {}),
    ],
)
def test_a_linear_is_plain_if_it_only_multiplies_by_its_weight(
    change: dict[str, Any], settings: dict[str, Any]
) -> None:
    config = VllmConfig(**settings)
    config.lora_config = change.get("lora")
    method = change.get("method", UnquantizedLinearMethod)
    with set_current_vllm_config(config):
        made: Any = SimpleNamespace(quant_method=method(), bias=change.get("bias"))
        assert fused_linears.is_plain(made) == (not change and not settings)


@pytest.mark.parametrize(
    ("ranks", "lora", "quant_config", "fused"),
    [
        ((96, 64, 72), None, None, ["q_proj.A", "k_proj.A", "v_proj.A"]),
        ((96, None, 40), None, None, ["q_proj.A", "v_proj.A"]),
        ((None, 64, None), None, None, []),
        ((96, 61, 40), None, None, []),  # rows that do not begin on 16 bytes
        ((96, 64, 72), LoRAConfig(max_lora_rank=8), None, []),
        ((96, 64, 72), None, "a quantizer's list of what it skipped, by name", []),
    ],
)
def test_aligned_down_factors_of_one_input_are_fused(
    ranks: tuple[int | None, ...],
    lora: Any,
    quant_config: Any,
    fused: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ColumnParallelLinear", "MergedColumnParallelLinear", "ReplicatedLinear"):
        monkeypatch.setattr(linear, name, lambda *_, **__: _Linear(8, 8))
    names = ("q_proj", "k_proj", "v_proj")
    by_name = {name: rank for name, rank in zip(names, ranks, strict=True) if rank is not None}
    config = VllmConfig()
    config.lora_config = lora
    with set_current_vllm_config(config):
        shards = linear.add_column_parallel(
            nn.Module(), dict.fromkeys(names, (512, 256)), by_name, False, quant_config, "attention"
        )
    assert shards == {name: ("down_factors", shard) for shard, name in enumerate(fused)}


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Linears count as plain ones on a GPU. Returns the calls of the kernel, which is torch."""
    calls: list[str] = []

    def linears(x: Any, weights: Any, tiling: str, counters: Any) -> torch.Tensor:
        calls.append(f"{len(weights)} by {tiling}")
        parts = x.split([weight.shape[1] for weight in weights], dim=1)
        pairs = zip(parts, weights, strict=True)
        return torch.cat([part @ weight.t() for part, weight in pairs], dim=1)

    def gated(x: Any, gate: Any, up: Any, tiling: str) -> torch.Tensor:
        calls.append(f"gated by {tiling}")
        return _swiglu(linears(x, [gate, up], tiling, None))

    monkeypatch.setattr(fused_linears, "is_eager_cuda", lambda x: True)
    monkeypatch.setattr(kernel, "linears", linears)
    monkeypatch.setattr(kernel, "gated_linears", gated)
    return calls


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return nn.functional.silu(gate) * up


def test_weight_reload_skips_counters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_linears, "is_plain", lambda linear: True)
    monkeypatch.setattr(type(fused_linears.current_platform), "is_cuda", lambda self: True)
    launch: Any = FusedLinears(*(_Linear(*shape) for shape in SHAPES))  # type: ignore[arg-type]
    counters = launch.counters
    assert counters.numel() > 0
    reload.record_metadata_for_reloading(launch)
    reload.initialize_layerwise_reload(launch)
    with caplog.at_level(logging.WARNING, reload.layerwise.logger.name):
        reload.finalize_layerwise_reload(launch, None)
    assert not caplog.messages
    assert launch.counters is counters  # captured graphs keep its address


class _Fused(nn.Module):
    """Gate and up with one A, as `add_column_parallel` makes them, and a k that is dense."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.down_factors: Any = _Linear(24, 10)
        self.down_factors.output_sizes = [8, 16]
        gate, up = _Linear(6, 8), _Linear(6, 16)
        self.gate, self.up, self.k = UpFactor(gate), UpFactor(up), _Linear(5, 10)  # type: ignore[arg-type]
        self.down_launch: Any = FusedLinears(self.down_factors)
        self.up_launch: Any = FusedLinears(gate, up)  # type: ignore[arg-type]
        self.down_launch.is_plain = self.up_launch.is_plain = plain


def _contiguous_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    assert gate.is_contiguous()
    assert up.is_contiguous()
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("tiling", "gated_tiling"), [(None, None), ("tiles", "tiles"), ("tiles", None)]
)
def test_fused_projections_match_torch(
    plain: bool,
    tiling: str | None,
    gated_tiling: str | None,
    on_a_gpu: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_kind = {False: tiling, True: gated_tiling}
    monkeypatch.setattr(kernel, "faster_tiling", lambda x, weights, is_gated: by_kind[is_gated])
    monkeypatch.setattr(silu_mul, "silu_mul", _contiguous_swiglu)
    owner, x = _Fused(plain), torch.randn(3, 10)
    gate_latent, up_latent = owner.down_factors(x)[0].split([8, 16], dim=1)
    expected = owner.gate.B(gate_latent)[0], owner.k(x)[0], owner.up.B(up_latent)[0]
    for got, right in zip(project(owner, ("gate", "k", "up"), x), expected, strict=True):
        torch.testing.assert_close(got, right)
    gated = project_gated(owner, ("gate", "up"), x, _swiglu)
    torch.testing.assert_close(gated, nn.functional.silu(expected[0]) * expected[2])
    assert ("gated by tiles" in on_a_gpu) == (plain and gated_tiling is not None)
