"""vLLM, on directories of other tools, gives the logprobs of the tools' own models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.importers.layer_models import heterogeneous
from tests.importers.low_rank_models import RANKS, SOME, TOOLS, low_rank
from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import MISTRAL, same, write
from tests.serving.agreement import ERROR, PROMPTS, assert_agrees
from tests.serving.engines import each_in_engine_process, served
from tests.serving.models import copy_tokenizer
from tests.serving.server import serve
from tests.support.dense_models import config
from vllm_gac.serving.loading.preflight import open_to_serve

# Sizes that vLLM's CPU kernels support.
BASE = config(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=4096,
    max_position_embeddings=1024,
)
Written = tuple[dict[str, Any], nn.Module, Callable[[str], str]]


def written_by_palu(dtype: str = "float16", **changes: Any) -> Written:
    raw = BASE | {"num_key_value_heads": 4, "num_attention_heads": 8} | changes
    # As transformers 4.37 writes it.
    written, model = palu(raw, ranks_of([([9, 16], [12, 31]), ([24], [40])]))
    del written["rope_parameters"], written["dtype"]
    old = {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": dtype, "use_cache": True}
    return {**written, **old, "_name_or_path": "meta-llama/Llama-2-7b-hf"}, model, same


def written_by(tool: str) -> Written:
    ranks = SOME | {"lm_head": 50} if tool == "asvd" else RANKS
    return *low_rank(TOOLS[tool], BASE, ranks), TOOLS[tool].rename


def with_layers(keys: dict[str, Any], layers: list[dict[str, Any]], **base: Any) -> Written:
    raw = BASE | {"num_hidden_layers": 3} | base
    return raw | keys, heterogeneous(raw, layers), same


LAYERS: list[dict[str, Any]] = [
    {"intermediate_size": 40, "num_key_value_heads": 1},
    {"skip": ["attention"]},
    {"intermediate_size": 80, "head_dim": 16, "num_key_value_heads": 4},
]
BLOCKS = [
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 4.0}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"num_key_value_heads": 4}, "ffn": {"intermediate_size": 80}},
]
BLOCK_LAYERS = [
    {"intermediate_size": 256, "num_key_value_heads": 1},
    {"skip": ["attention", "mlp"]},
    {"intermediate_size": 80, "num_key_value_heads": 4},
]
PRUNED = [{"num_attention_heads": 2, "num_key_value_heads": 1}, {}, {"intermediate_size": 40}]
DECILM = {
    "model_type": "nemotron-nas",
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    "num_key_value_heads": None,
    "intermediate_size": None,
    "block_configs": BLOCKS,
}
ANYMODEL = {
    "architectures": ["AnyModel"],
    "base_architecture": "Qwen3ForCausalLM",
    "block_configs": [
        {"attention": {"no_op": True}, "ffn": {"intermediate_size": 80}},
        {"attention": {"num_key_value_heads": 1}, "ffn": {"no_op": True}},
        {"attention": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 96}},
    ],
}
ANYMODEL_LAYERS: list[dict[str, Any]] = [
    {"skip": ["attention"], "intermediate_size": 80},
    {"skip": ["mlp"], "num_key_value_heads": 1},
    {},
]

CASES: dict[str, tuple[str, Callable[[], Written]]] = {
    "palu": ("palu", written_by_palu),
    "palu, Mistral": (
        "palu",
        lambda: written_by_palu("float32", **MISTRAL, tie_word_embeddings=True),
    ),
    "per-layer-config": (
        "per-layer-config",
        lambda: with_layers(
            {"per_layer_config": {str(i): dims for i, dims in enumerate(LAYERS)}}, LAYERS
        ),
    ),
    "asvd": ("asvd", lambda: written_by("asvd")),
    "arena": ("low-rank", lambda: written_by("arena")),
    "svd-llm": ("svd-llm", lambda: written_by("svd-llm")),
    "blocks": ("block-configs", lambda: with_layers(DECILM, BLOCK_LAYERS)),
    "blocks, Qwen3": (
        "block-configs",
        lambda: with_layers(ANYMODEL, ANYMODEL_LAYERS, model_type="qwen3"),
    ),
    "pruned": ("hf-pruned", lambda: with_layers({}, PRUNED)),
}
Served = dict[str, tuple[Path, nn.Module, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """By case: the directory, the tool's own model, and the answers of an engine.

    One process has an engine after the other, of all cases.
    """
    root = tmp_path_factory.mktemp("imported")
    written = {case: _written(root / case, made) for case, (_, made) in CASES.items()}
    answered = each_in_engine_process(served, [[str(path)] for path, _ in written.values()])
    return {
        case: (*there, answers)
        for (case, there), (answers, *_) in zip(written.items(), answered, strict=True)
    }


def _written(directory: Path, made: Callable[[], Written]) -> tuple[Path, nn.Module]:
    raw, model, rename = made()
    dtype = torch.float16 if raw.get("torch_dtype") == "float16" else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    write(directory, raw, model, rename, dtype=dtype)
    copy_tokenizer(directory)
    return directory, model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logprobs_match_the_original(case: str, models: Served) -> None:
    directory, model, answers = models[case]
    assert open_to_serve(directory)[0] == CASES[case][0]
    # Palu's files are in fp16 there, and so is the o_proj that its values are absorbed in.
    error = 1e-3 if case == "palu" else ERROR
    assert_agrees(answers, lambda ids: model(ids).logits, case, error, error)


@pytest.mark.slow
def test_a_server_recognizes_a_directory_by_its_content(models: Served, tmp_path: Path) -> None:
    directory, _, answers = models["palu"]
    with serve(directory, tmp_path / "log", "--dtype", "float32") as server:
        log = server.log.read_text()
        assert "Serving a model in the format palu as GacLlamaForCausalLM" in log
        assert "load_format=gac" in log
        tokens = [tokens for tokens, _ in server.completions(PROMPTS, len(answers[0][0]))]
        assert tokens == [tokens for tokens, _ in answers]
        text = {"model": server.model, "prompt": "def f(", "max_tokens": 4}
        assert server.client().completions.create(**text).choices[0].text
