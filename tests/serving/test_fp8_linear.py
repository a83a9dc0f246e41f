"""Which linears in FP8 take an input that the kernel before has quantized, and what they are given.

On a CPU there is no kernel of vLLM's for them; a stand-in multiplies in fp32.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from tests.serving.agreement import PROMPTS
from tests.serving.engines import GPU_OPTIONS, in_engine_process, scored_prompts
from tests.serving.models import HETEROGENEOUS, write_model
from vllm_gac.kernels import gpu_limits
from vllm_gac.serving.model import fp8_linear, fused_linears
from vllm_gac.serving.model.fp8_linear import Fp8Linear


class Kernel:
    """What `apply_scaled_mm` of CUTLASS's kernel gives."""

    def apply_scaled_mm(self, **given: Any) -> torch.Tensor:
        product = (given["A"].float() * given["As"]) @ (given["B"].float() * given["Bs"])
        product += 0 if given["bias"] is None else given["bias"]
        return product.to(given["out_dtype"]).view(given["output_shape"])


class Linear(ColumnParallelLinear):
    """A linear whose part on one of two GPUs is [16, 32], without what vLLM's constructor needs."""

    def __init__(self, **changed: Any) -> None:
        torch.nn.Module.__init__(self)
        sizes = {"input_size_per_partition": 32, "output_size_per_partition": 16}
        facts = {"bias": None, "tp_size": 2, "reduce_results": True} | sizes | changed
        for name, value in facts.items():
            setattr(self, name, value)
        self.weight = torch.randn(32, 16)
        self.weight_scale = torch.tensor([0.5])


class RowLinear(Linear, RowParallelLinear):
    """One that splits its input, so that outputs of the ranks are to be added."""


def _is_fp8(
    monkeypatch: pytest.MonkeyPatch, lora: Any = None, kind: type[Linear] = Linear, **linear: Any
) -> Any:
    config = VllmConfig()
    config.lora_config = lora
    monkeypatch.setattr(fp8_linear, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: Kernel())
    monkeypatch.setattr(gpu_limits, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with set_current_vllm_config(config):
        return Fp8Linear(kind(**linear)).is_fp8


def test_only_plain_linears_take_quantized_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _is_fp8(monkeypatch)
    assert _is_fp8(monkeypatch, kind=RowLinear)
    assert _is_fp8(monkeypatch, bias="bias")
    assert not _is_fp8(monkeypatch, lora=LoRAConfig(max_lora_rank=8))
    for change in ({"bias": "bias", "kind": RowLinear}, {"input_size_per_partition": 40},
                   {"output_size_per_partition": 24},
                   {"input_size_per_partition": 32768}):  # fmt: skip
        assert not _is_fp8(monkeypatch, **change), change


def test_quantized_inputs_and_scales_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: Kernel())
    monkeypatch.setattr(fused_linears, "tensor_model_parallel_all_reduce", lambda out: 3 * out)
    numbers, scales = torch.randn(3, 32), torch.rand(3, 1)
    biased, one_rank = Linear(bias=torch.randn(16)), RowLinear(tp_size=1)
    for linear, ranks in ((Linear(), 1), (biased, 1), (RowLinear(), 3), (one_rank, 1)):
        with set_current_vllm_config(VllmConfig()):
            out = Fp8Linear(linear).multiply((numbers, scales), torch.float32)
        bias = linear.bias if linear is biased else 0
        torch.testing.assert_close(out, ranks * numbers * scales @ (linear.weight * 0.5) + bias)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["fp8_per_tensor", "fp8_per_channel"])
def test_fused_fp8_quantization_is_as_accurate_as_separate(weights: str, tmp_path: Path) -> None:
    """Prompts, and tokens one after the other in CUDA graphs."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    exact, apart, fused = (
        in_engine_process(scored, str(tmp_path / "model"), GPU_OPTIONS | options, may_fuse)
        for options, may_fuse in (
            ({}, True),
            ({"quantization": weights}, False),
            ({"quantization": weights}, True),
        )
    )
    assert fused["fused"]
    assert not apart["fused"]
    error, error_apart = (distance(actual, exact) for actual in (fused, apart))
    assert 0 < error < 1.25 * error_apart
    assert 0 < distance(fused, apart) < 1.25 * error_apart


def distance(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = list(zip(actual["logprobs"], expected["logprobs"], strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def scored(model: str, options: dict[str, Any], may_fuse: bool) -> dict[str, Any]:
    """Logprobs of all tokens of the prompts, and of first and second tokens of answers."""
    from vllm import LLM, SamplingParams

    if not may_fuse:
        fp8_linear._is_plain_fp8 = lambda linear: False  # type: ignore[assignment]
    llm = LLM(model, **options)
    scored = scored_prompts(llm)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    decoded = llm.generate(
        prompts,
        SamplingParams(max_tokens=8, min_tokens=8, logprobs=0, allowed_token_ids=[7]),
        use_tqdm=False,
    )
    scored += [step[7].logprob for output in decoded for step in output.outputs[0].logprobs]
    return {"logprobs": scored, "fused": llm.collective_rpc(_is_fused)[0]}


def _is_fused(worker: Any) -> bool:
    """Whether a norm and SwiGLU of ours quantize what they give. Runs in the worker."""
    first = worker.get_model().model.layers[0]
    fused = getattr(first.self_attn, "fp8_qkv", None), getattr(first.mlp, "fp8_down", None)
    return all(linear is not None and linear.is_fp8 for linear in fused)
