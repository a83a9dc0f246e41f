"""Which linears in FP8 take an input that the kernel before has quantized, and what they are given.

On a CPU there is no kernel of vLLM's for them; a stand-in multiplies in fp32.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from vllm_gac.kernels import swiglu
from vllm_gac.serving.model import fp8_linear
from vllm_gac.serving.model.fp8_linear import Fp8Linear


class Kernel:
    """What `apply_scaled_mm` of CUTLASS's kernel gives."""

    def apply_scaled_mm(self, **given: Any) -> torch.Tensor:
        assert given["bias"] is None
        product = (given["A"].float() * given["As"]) @ (given["B"].float() * given["Bs"])
        return product.to(given["out_dtype"]).view(given["output_shape"])


class Linear(LinearBase):
    """A linear of these sizes, without what vLLM's own needs to be made."""

    def __init__(self, **changed: Any) -> None:
        torch.nn.Module.__init__(self)
        facts = {"bias": None, "tp_size": 1, "input_size": 32, "output_size": 16, **changed}
        for name, value in facts.items():
            setattr(self, name, value)
        self.weight = torch.randn(32, 16)
        self.weight_scale = torch.tensor([0.5])


def _is_fp8(
    monkeypatch: pytest.MonkeyPatch, asked: bool = True, lora: Any = None, **of: Any
) -> Any:
    config = VllmConfig()
    config.load_config.model_loader_extra_config = {"fused_fp8": True} if asked else {}
    config.lora_config = lora
    monkeypatch.setattr(fp8_linear, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: Kernel())
    monkeypatch.setattr(swiglu, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with set_current_vllm_config(config):
        return Fp8Linear(Linear(**of)).is_fp8


def test_only_plain_linears_take_quantized_inputs_and_only_if_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _is_fp8(monkeypatch)
    assert not _is_fp8(monkeypatch, asked=False)
    assert not _is_fp8(monkeypatch, lora=LoRAConfig(max_lora_rank=8))
    for change in ({"bias": "bias"}, {"tp_size": 2}, {"input_size": 40}, {"output_size": 24},
                   {"input_size": 32768}):  # fmt: skip
        assert not _is_fp8(monkeypatch, **change), change


def test_numbers_and_scales_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "fp8_kernel_of", lambda linear: Kernel())
    linear, numbers, scales = Linear(), torch.randn(3, 32), torch.rand(3, 1)
    with set_current_vllm_config(VllmConfig()):
        out = Fp8Linear(linear).multiply((numbers, scales), torch.float32)
    torch.testing.assert_close(out, numbers * scales @ (linear.weight * 0.5))
