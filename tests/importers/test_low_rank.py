"""ASVD and SVD-LLM: linears as two factors, in the form of each tool."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.low_rank_models import RANKS, SOME, TOOLS, Ranks, low_rank, write_low_rank
from tests.importers.tools import MISTRAL, assert_same_logits, write
from tests.support.dense_models import config
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.steps.inspect import inspect
from vllm_gac.steps.verify import verify

BIASED = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        pytest.param({}, RANKS, id="every linear"),
        pytest.param({"num_key_value_heads": 4}, SOME, id="some linears"),
        pytest.param(BIASED, RANKS, id="biases"),
        pytest.param(TIED, SOME, id="tied embeddings"),
        # At rank 40 of 48 x 96, the two factors are larger than the linear.
        pytest.param({}, RANKS | dict.fromkeys(list(RANKS)[4:6], 40), id="ranks that do not pay"),
    ],
)
def test_logits_are_those_of_the_original(
    tool: str, changes: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    written, model = write_low_rank(tmp_path, tool, ranks, **changes)
    assert_same_logits(written, model, TOOLS[tool].format)


def test_mistral_with_its_window(tmp_path: Path) -> None:
    assert_same_logits(*write_low_rank(tmp_path, "svd-llm", RANKS, **MISTRAL), "svd-llm")


@pytest.mark.parametrize("tied", [False, True])
def test_a_factorized_lm_head_is_rebuilt(tied: bool, tmp_path: Path) -> None:
    written, model = low_rank(TOOLS["asvd"], config(), SOME | {"lm_head": 20})
    written["tie_word_embeddings"] = tied  # the tool does not update this key
    assert_same_logits(write(tmp_path, written, model), model, "asvd")


def test_linears_are_served_as_the_factors_that_are_smaller(tmp_path: Path) -> None:
    ranks = SOME | {"model.layers.1.mlp.up_proj": 40}
    inspection = inspect(write_low_rank(tmp_path, "asvd", ranks)[0])
    assert [layer["ranks"] for layer in inspection.layers] == [
        {"self_attn.v_proj": 5, "mlp.gate_proj": 7, "mlp.up_proj": 8, "mlp.down_proj": 9},
        {"self_attn.v_proj": 7},
    ]


def test_svd_llm_may_store_factors_in_another_dtype_than_the_rest(tmp_path: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            tensors[name] = tensors[name].half()

    written, model = write_low_rank(tmp_path, "svd-llm", RANKS, halve)
    for name, parameter in model.named_parameters():
        if name in ("model.embed_tokens.weight", "model.norm.weight"):
            parameter.data = parameter.data.half().float()
    assert_same_logits(written, model, "svd-llm")


UP = "model.layers.0.mlp.up_proj"


def test_factors_whose_product_is_too_large_are_a_fault(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})
        for factor in ("ALinear", "BLinear"):
            tensors[f"{UP}.{factor}.weight"].fill_(6e4)

    ranks = SOME | {UP: 40}  # multiplied out
    (fault,) = verify(write_low_rank(tmp_path, "asvd", ranks, change)[0]).faults
    assert all(f"{UP}.{name}" in fault for name in ("ALinear.weight", "BLinear.weight", "weight"))


@pytest.mark.parametrize("shape", [(0, 48), (8,), (8, 48, 1)])
def test_a_factor_that_is_no_matrix_gives_no_rank(shape: tuple[int, ...], tmp_path: Path) -> None:
    change = {(down := "model.layers.0.mlp.up_v_proj.weight"): torch.ones(shape)}
    directory, _ = write_low_rank(tmp_path, "svd-llm", SOME, lambda t: t.update(change))
    with pytest.raises(CheckpointError, match=down):
        inspect(directory)


def test_nothing_of_the_authors_code_is_in_the_config_to_serve_by(tmp_path: Path) -> None:
    _, checkpoint = open_any_format(write_low_rank(tmp_path, "asvd", SOME)[0])
    assert checkpoint.raw_config["architectures"] == ["GacLlamaForCausalLM"]
    assert checkpoint.raw_config["gac"]["source"] == {"format": "asvd"}
    assert not {"auto_map", "truncation_ranks"} & checkpoint.raw_config.keys()
