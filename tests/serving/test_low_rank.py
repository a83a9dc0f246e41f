"""Which down factors share a GEMM, and which factors a quantizer skipped.

vLLM treats the factors of a low-rank linear as linears.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QuantizationConfig, auto_awq, auto_gptq, fp8

from vllm_gac.serving.model import linear
from vllm_gac.serving.model.llama import GacLlamaForCausalLM

MLP = "model.layers.0.mlp"
GATE_A, UP_A = f"{MLP}.gate_proj.A", f"{MLP}.up_proj.A"
GATE_B, UP_B, DOWN = f"{MLP}.gate_proj.B", f"{MLP}.up_proj.B", f"{MLP}.down_proj"
NAMES = ("gate_proj", "up_proj")
ALL = {GATE_A, GATE_B, UP_A, UP_B, f"{DOWN}.A", f"{DOWN}.B"}
# Quantization configs as vLLM makes them from config.json; arguments are the skipped linears.
LISTS = {
    "awq": lambda *names: auto_awq.AutoAWQConfig(4, 128, True, False, list(names)),
    "fp8": lambda *names: fp8.Fp8Config(ignored_layers=list(names)),
    "gptq": lambda *names: auto_gptq.AutoGPTQConfig(
        4, 128, False, True, False, {rf"-:.*{name}$": {} for name in names}, {}
    ),
}
METHODS = (
    (auto_awq, "AutoAWQMarlinLinearMethod"),
    (auto_awq, "AutoAWQLinearMethod"),
    (auto_gptq, "AutoGPTQLinearMethod"),
    (fp8, "Fp8LinearMethod"),
)


class LinearStub(LinearBase):
    """One of vLLM's linears, up to the choice of its quantization method."""

    bias = None

    def __init__(self, *_: Any, quant_config: Any = None, prefix: str = "", **__: Any) -> None:
        nn.Module.__init__(self)
        self.prefix = prefix
        if quant_config is None:
            self.quant_method = UnquantizedLinearMethod()
        else:
            self.quant_method = quant_config.get_quant_method(self, prefix=prefix)


@pytest.fixture(autouse=True)
def _without_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kinds = ("Column", "Row", "MergedColumn")
    for name in (*(f"{kind}ParallelLinear" for kind in kinds), "ReplicatedLinear"):
        monkeypatch.setattr(linear, name, LinearStub)
    for module, name in METHODS:  # they look for GPU kernels
        monkeypatch.setattr(module, name, lambda *_: SimpleNamespace())
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize(
    ("ranks", "lora", "fused"),
    [
        ((96, 64, 72), None, ["q_proj.A", "k_proj.A", "v_proj.A"]),
        ((96, None, 40), None, ["q_proj.A", "v_proj.A"]),
        ((None, 64, None), None, []),
        ((96, 61, 40), None, []),  # rows that do not begin on 16 bytes
        ((96, 64, 72), LoRAConfig(max_lora_rank=8), []),
    ],
)
def test_down_factors_of_an_input_are_fused_if_aligned_and_without_adapters(
    ranks: tuple[int | None, ...], lora: Any, fused: list[str]
) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    by_name = {name: rank for name, rank in zip(names, ranks, strict=True) if rank is not None}
    config = VllmConfig()
    config.lora_config = lora
    with set_current_vllm_config(config):
        shards = linear.add_column_parallel(
            nn.Module(), dict.fromkeys(names, (512, 256)), by_name, False, None, "attention"
        )
    assert shards == {name: ("down_factors", shard) for shard, name in enumerate(fused)}


def unquantized(config: QuantizationConfig) -> set[str]:
    """The linears of a low-rank MLP that `config` does not quantize."""
    config.packed_modules_mapping = GacLlamaForCausalLM.packed_modules_mapping
    owner = nn.Module()
    shapes, ranks = {"gate_proj": (512, 256), "up_proj": (512, 256)}, dict.fromkeys(NAMES, 64)
    assert linear.add_column_parallel(owner, shapes, ranks, False, config, MLP) == {}
    owner.down_proj = linear.parallel_linear(
        linear.RowParallelLinear, 512, 256, 64, False, config, DOWN
    )
    made = {m.prefix: m.quant_method for m in owner.modules() if isinstance(m, LinearStub)}
    assert made.keys() == ALL  # no fused down_factors, which no list names
    return {name for name, how in made.items() if isinstance(how, UnquantizedLinearMethod)}


@pytest.mark.parametrize("method", LISTS)
@pytest.mark.parametrize("names", [(), (GATE_A,), (GATE_A, UP_A), (UP_B, f"{DOWN}.A")], ids=str)
def test_factors_that_a_list_names_areunquantized(method: str, names: tuple[str, ...]) -> None:
    assert unquantized(LISTS[method](*names)) == set(names)


def test_awq_takes_parts_of_names() -> None:
    assert unquantized(LISTS["awq"]("up_proj")) == {UP_A, UP_B}
    assert unquantized(LISTS["awq"](".A")) == {GATE_A, UP_A, f"{DOWN}.A"}
