"""Which low-rank linears are one launch if the loader's option asks for it, and what it is given.

On a CPU a stand-in multiplies; tests/kernels/test_both_factors.py has the kernel's own tests.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from tests.serving.engines import GPU_OPTIONS, in_engine_process, scored_prompts
from tests.serving.models import layer, write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.kernels import both_factors as kernel
from vllm_gac.kernels import fp8_rows, gpu_limits
from vllm_gac.serving.model import both_factors, fp8_linear
from vllm_gac.serving.model.both_factors import MOST_TOKENS, BothFactors, check_asked
from vllm_gac.serving.model.linear import LowRankLinear, UpFactor, project, project_gated


class Linear(LinearBase):
    """A linear of these sizes, without what vLLM's own needs to be made."""

    def __init__(self, out_size: int, in_size: int, is_fp8: bool = False, **changed: Any) -> None:
        nn.Module.__init__(self)
        facts = {"bias": None, "tp_size": 1, "input_size": in_size, "output_size": out_size,
                 "prefix": "model.linear", "quant_method": UnquantizedLinearMethod(),
                 **changed}  # fmt: skip
        for name, value in facts.items():
            setattr(self, name, value)
        weight = torch.randn(out_size, in_size) / in_size**0.5
        self.weight = weight.t() if is_fp8 else weight
        self.weight_scale = torch.rand(out_size, 1) + 0.5

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.t(), None


def by_torch(x: Any, linears: Any, shape: Any, counter: Any, **options: Any) -> torch.Tensor:
    """What kernels/both_factors.py: low_rank gives."""
    assert counter.tolist() == [0]
    outs = []
    for linear in linears:
        assert linear.down.is_contiguous()
        assert linear.up.is_contiguous()
        out = x @ linear.down.t() * _row(linear.down_scale) @ linear.up.t() * _row(linear.up_scale)
        outs.append(out if options["x_scales"] is None else out * options["x_scales"])
    if options["is_gated"]:
        return (nn.functional.silu(outs[0]) * outs[1]).to(options["out_dtype"])
    return torch.cat(outs, dim=1).to(options["out_dtype"])


def _row(scale: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(1) if scale is None else scale.view(-1)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """The option is on, and this is a Hopper GPU, whose linears are not quantized."""
    config = VllmConfig()
    config.load_config.model_loader_extra_config = {"both_factors": True}
    on_a_gpu = SimpleNamespace(is_cuda=lambda: True)
    for module in (both_factors, fp8_linear):
        monkeypatch.setattr(module, "current_platform", on_a_gpu)
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: None)
    monkeypatch.setattr(both_factors, "runs_as_written", lambda x: True)
    monkeypatch.setattr(gpu_limits, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernel, "low_rank", by_torch)
    with set_current_vllm_config(config):
        yield config


def pair(rank: int = 16, in_size: int = 32, **of: Any) -> both_factors.Pair:
    return Linear(rank, in_size, **of), slice(None), Linear(24, rank, **of)


def test_it_is_off_unless_it_is_asked_for() -> None:
    with set_current_vllm_config(VllmConfig()):
        launch = BothFactors(pair())
    assert launch.at_once(torch.randn(3, 32)) is None
    assert not launch.takes_quantized(torch.randn(3, 32))
    assert launch.counter.numel() == 0


@pytest.mark.parametrize(
    "change", [{"bias": "bias"}, {"tp_size": 2}, {"quant_method": None}, {"input_size": 20}]
)
def test_what_it_does_not_take_is_refused(change: dict[str, Any], config: VllmConfig) -> None:
    with pytest.raises(
        CheckpointError, match=r"takes low-rank .* not so for model\.linear, model\.linear"
    ):
        BothFactors(pair(), pair(**change))


def test_adapters_and_other_machines_are_refused(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.lora_config = LoRAConfig(max_lora_rank=8)
    with pytest.raises(CheckpointError, match="leave it out"):
        BothFactors(pair())
    config.lora_config = None
    BothFactors(pair())
    monkeypatch.setattr(both_factors, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    with pytest.raises(CheckpointError, match="leave it out"):
        BothFactors(pair())


def test_a_model_that_would_never_use_it_is_refused(config: VllmConfig) -> None:
    check_asked(is_low_rank=True, is_compiled=False)
    with pytest.raises(CheckpointError, match="no low-rank linear"):
        check_asked(is_low_rank=False, is_compiled=False)
    with pytest.raises(CheckpointError, match="compiled"):
        check_asked(is_low_rank=True, is_compiled=True)
    with set_current_vllm_config(VllmConfig()):
        check_asked(is_low_rank=False, is_compiled=True)


def test_a_low_rank_linear_is_one_launch_for_few_tokens(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_rank = LowRankLinear(Linear(16, 32), Linear(24, 16))
    calls: list[int] = []

    def counted(x: torch.Tensor, *of: Any, **options: Any) -> torch.Tensor:
        calls.append(len(x))
        return by_torch(x, *of, **options)

    monkeypatch.setattr(kernel, "low_rank", counted)
    for tokens in (1, MOST_TOKENS, MOST_TOKENS + 1):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(low_rank(x)[0], low_rank.B(low_rank.A(x)[0])[0])
    assert calls == [1, MOST_TOKENS]


class Owner(nn.Module):
    """Gate and up as `add_column_parallel` makes them: with one A, or each with its own."""

    def __init__(self, is_fused: bool, is_gated: bool) -> None:
        super().__init__()
        gate, up = Linear(24, 16), Linear(24, 8)
        down: Any = Linear(24, 32)
        down.output_sizes = [16, 8]
        of_gate, of_up = Linear(16, 32), Linear(8, 32)
        of_gate.weight, of_up.weight = down.weight.split([16, 8])
        if is_fused:
            self.down_factors = down
            self.gate: nn.Module = UpFactor(gate)
            self.up: nn.Module = UpFactor(up)
            pairs = (down, slice(0, 16), gate), (down, slice(16, 24), up)
        else:
            self.gate, self.up = LowRankLinear(of_gate, gate), LowRankLinear(of_up, up)
            pairs = (of_gate, slice(None), gate), (of_up, slice(None), up)
        self.both_factors = BothFactors(*pairs, is_gated=is_gated)
        self.expected = lambda x: [
            x @ a.weight.t() @ b.weight.t() for a, b in ((of_gate, gate), (of_up, up))
        ]


@pytest.mark.parametrize("is_fused", [True, False])
def test_linears_of_one_input_are_one_launch(is_fused: bool, config: VllmConfig) -> None:
    x = torch.randn(3, 32)
    owner = Owner(is_fused, is_gated=False)
    for got, right in zip(project(owner, ("gate", "up"), x), owner.expected(x), strict=True):
        torch.testing.assert_close(got, right)
    owner = Owner(is_fused, is_gated=True)
    gate, up = owner.expected(x)
    gated = project_gated(owner, ("gate", "up"), x, lambda x: pytest.fail("was not one launch"))
    torch.testing.assert_close(gated, nn.functional.silu(gate) * up)


def test_linears_in_fp8_take_what_is_quantized(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: "CUTLASS's")
    down, rows, up = pair(is_fp8=True)
    up.output_size = 32  # FP8 takes multiples of 16
    launch = BothFactors((down, rows, up))
    numbers, scales = torch.randn(3, 32), torch.rand(3, 1)
    assert launch.takes_quantized(numbers)
    assert not launch.takes_quantized(torch.randn(MOST_TOKENS + 1, 32))
    latents = numbers * scales @ (down.weight * down.weight_scale.t())
    expected = latents @ (up.weight * up.weight_scale.t())
    torch.testing.assert_close(launch.multiply((numbers, scales), torch.float32), expected)
    monkeypatch.setattr(fp8_rows, "quantized", lambda x: (x, scales))
    found = launch.at_once(numbers)
    assert found is not None
    torch.testing.assert_close(found, expected)


RANKS = {"self_attn.q_proj": 96, "self_attn.k_proj": 64, "self_attn.v_proj": 64,
         "self_attn.o_proj": 112, "mlp.gate_proj": 96, "mlp.up_proj": 80,
         "mlp.down_proj": 128}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8_per_tensor", "fp8_per_channel"])
def test_text_is_scored_as_closely_as_with_factors_apart(
    weights: str | None, tmp_path: Path
) -> None:
    assert GPU_OPTIONS["max_num_batched_tokens"] <= MOST_TOKENS
    layers = [layer(("rotary", 4, 64), (4, 64), 512, RANKS)] * 2
    write_model(tmp_path / "model", layers)
    finer = {"dtype": "float16"} if weights is None else {}
    types = {} if weights is None else {"quantization": weights}
    exact, apart, together = (
        in_engine_process(_scored, str(tmp_path / "model"), GPU_OPTIONS | options)
        for options in (
            finer,
            types,
            types | {"model_loader_extra_config": {"both_factors": True}},
        )
    )
    assert together["launches"] > 0
    assert apart["launches"] == 0
    error, error_apart = (_distance(found, exact) for found in (together, apart))
    assert 0 < error < 1.25 * error_apart


def _distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = list(zip(found["logprobs"], expected["logprobs"], strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _scored(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of all tokens of the prompts."""
    from vllm import LLM

    llm = LLM(model, **options)
    return {
        "logprobs": scored_prompts(llm),
        "launches": llm.collective_rpc(_launches)[0],
    }


def _launches(worker: Any) -> int:
    """How many groups of linears are one launch. Runs in the worker."""
    modules = worker.get_model().modules()
    return sum(isinstance(module, BothFactors) and module.is_on for module in modules)
