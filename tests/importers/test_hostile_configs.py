"""An untrusted config.json in the form of each tool is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.importers.basis_models import GROUPS, NUM_BASIS
from tests.importers.low_rank_models import SOME, TOOLS
from tests.importers.palu_models import ranks_of
from tests.support.dense_models import config
from tests.support.model_files import config as bytes_config
from tests.support.model_files import write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.inspect import inspect

FORMATS: dict[str, dict[str, Any]] = {
    "palu": {"model_type": "palullama", "head_wise_ranks": ranks_of([([9, 16], [12, 31])])},
    "per-layer-config": {"per_layer_config": {"0": {"intermediate_size": 8}}},
    "block-configs": {"block_configs": [{"attention": {}, "ffn": {"intermediate_size": 8}}] * 2},
    "layer-lists": {"layer_inter_size": [8, 16]},
    "basis-sharing": {f"num_basis_{x}": rank for x, rank in NUM_BASIS.items()}
    | {f"{x}_groups": groups for x, groups in GROUPS.items()},
    **{name: TOOLS[name].rewrite({}, SOME) for name in ("asvd", "arena", "svd-llm, arena")},
}
CHANGES: dict[str, dict[str, Any]] = {
    "a list for a type": {"model_type": ["llama"]},
    "no type": {"model_type": None},
    "another type": {"model_type": "gpt2"},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers beyond 64 bits": {"num_hidden_layers": 2**70},
    "layers by halves": {"num_hidden_layers": 2.5},
    "no layers": {"num_hidden_layers": 0},
    "a wide bomb": {"hidden_size": 2**62},
    "a vocabulary bomb": {"vocab_size": 10**12},
    "no heads": {"num_attention_heads": 0},
    "heads of text": {"num_attention_heads": "4"},
    "heads that do not divide": {"num_attention_heads": 4, "num_key_value_heads": 3},
    "odd heads": {"head_dim": 15},
    "other RoPE": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "another activation": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("keys", FORMATS.values(), ids=FORMATS)
def test_an_impossible_config_is_refused_in_one_sentence(
    keys: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, bytes_config())
    refused(tmp_path, config() | keys | change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_impossible_base_config_is_refused_in_one_sentence(
    change: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path, bytes_config())
    base_type = {"base_model_type": change["model_type"]} if "model_type" in change else {}
    refused(tmp_path, TOOLS["lems"].rewrite(config() | change, SOME) | base_type)


def refused(directory: Path, raw: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as error:
        inspect(directory)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)
