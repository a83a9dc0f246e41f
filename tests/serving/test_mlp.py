"""Which MLPs compute gate, up and activation in one kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

pytest.importorskip("vllm")

from vllm.config import KernelConfig, LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_gac.kernels import swiglu
from vllm_gac.serving.model.fused_linears import is_plain
from vllm_gac.serving.model.llama import GacMLP


def _is_plain(
    method: object = UnquantizedLinearMethod,
    lora: object = None,
    bias: object = None,
    **settings: Any,
) -> bool:
    config = VllmConfig(**settings)
    config.lora_config = lora  # type: ignore[assignment]
    with set_current_vllm_config(config):
        linear: Any = SimpleNamespace(quant_method=method(), bias=bias)  # type: ignore[operator]
        return is_plain(linear)


def test_a_linear_is_plain_if_it_only_multiplies_by_its_weight() -> None:
    class Quantized(UnquantizedLinearMethod):
        """A quantization method that derives from it."""

    assert _is_plain()
    assert not _is_plain(Quantized)
    assert not _is_plain(bias="bias")
    assert not _is_plain(kernel_config=KernelConfig(linear_backend="cutlass"))
    assert not _is_plain(lora=LoRAConfig(max_lora_rank=8))


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("faster", [True, False])
def test_gate_and_up_run_in_one_kernel_if_it_is_faster(
    plain: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swiglu, "is_faster", lambda x, weight: faster)
    monkeypatch.setattr(swiglu, "swiglu_linear", lambda x, weight: f"one kernel on {weight}")
    mlp: Any = GacMLP.__new__(GacMLP)
    nn.Module.__init__(mlp)
    mlp.is_fused, mlp.is_plain = True, plain
    mlp.gate_up_proj, mlp.act_fn = _Gemm(), "{} and activation".format
    expected = "one kernel on weight" if plain and faster else "GEMM and activation"
    assert mlp._gated(SimpleNamespace(is_cuda=True)) == expected
    assert mlp._gated(SimpleNamespace(is_cuda=False)) == "GEMM and activation"


class _Gemm:
    weight = "weight"

    def __call__(self, x: object) -> tuple[str, None]:
        return "GEMM", None
