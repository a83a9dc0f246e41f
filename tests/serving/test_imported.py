"""`vllm serve` on directories of other tools gives the logprobs of the tools' own models."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.importers.basis_models import GROUPS, basis_sharing, own_name
from tests.importers.layer_models import heterogeneous
from tests.importers.low_rank_models import RANKS, SOME, TOOLS, low_rank
from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import MISTRAL, same, write
from tests.serving.server import Server, ServerDiedError, serve
from tests.support.dense_models import config
from vllm_gac import demo

# Sizes that vLLM's CPU kernels support.
BASE = config(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=4096,
    max_position_embeddings=1024,
)
PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(40 - 7 * i)] for i in range(3)]
Written = tuple[dict[str, Any], nn.Module, Callable[[str], str]]


def written_by_palu(**changes: Any) -> Written:
    raw = BASE | {"num_key_value_heads": 4, "num_attention_heads": 8} | changes
    # As transformers 4.37 writes it.
    written, model = palu(raw, ranks_of([([9, 16], [12, 31]), ([24], [40])]))
    del written["rope_parameters"], written["dtype"]
    old = {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float16", "use_cache": True}
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
SHARED = {name: [g for g in groups if max(g) < 2] for name, groups in GROUPS.items()}
SHARED["gate"] = [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_format", "made", "flags"),
    [
        # Each case starts a server. Without --load-format, the format is
        # recognized by the directory's content.
        ("palu", written_by_palu, []),
        pytest.param(
            "palu",
            lambda: written_by_palu(**MISTRAL, tie_word_embeddings=True),
            ["--load-format", "gac"],
            id="palu, Mistral",
        ),
        pytest.param(
            "per-layer-config",
            lambda: with_layers(
                {"per_layer_config": {str(i): dims for i, dims in enumerate(LAYERS)}}, LAYERS
            ),
            ["--load-format", "gac"],
        ),
        *(
            pytest.param(model_format, made, ["--load-format", "gac"], id=name)
            for name, model_format, made in (
                ("asvd", "asvd", lambda: written_by("asvd")),
                ("arena", "low-rank", lambda: written_by("arena")),
                ("svd-llm, arena", "svd-llm", lambda: written_by("svd-llm, arena")),
                ("svd-llm", "svd-llm", lambda: written_by("svd-llm")),
                ("lems", "lems", lambda: written_by("lems")),
                ("basis", "basis-sharing", lambda: (*basis_sharing(BASE, SHARED), own_name)),
                ("blocks", "block-configs", lambda: with_layers(DECILM, BLOCK_LAYERS)),
                (
                    "blocks, Qwen3",
                    "block-configs",
                    lambda: with_layers(ANYMODEL, ANYMODEL_LAYERS, model_type="qwen3"),
                ),
                (
                    "lists",
                    "layer-lists",
                    lambda: with_layers(
                        {"layer_inter_size": [40, 8, 96]},
                        [{"intermediate_size": width} for width in (40, 8, 96)],
                    ),
                ),
                ("pruned", "hf-pruned", lambda: with_layers({}, PRUNED)),
            )
        ),
    ],
)
def test_served_logprobs_match_the_original(
    model_format: str, made: Callable[[], Written], flags: list[str], tmp_path: Path
) -> None:
    written, model, rename = made()
    dtype = torch.float16 if written.get("torch_dtype") == "float16" else torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    directory = write(tmp_path / "model", written, model, rename, dtype=dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, directory)
    with serve(directory, tmp_path / "log", "--dtype", "float32", *flags) as server:
        assert_logprobs(server, model)
        log = server.log.read_text()
        assert f"Serving a model in the format {model_format} as GacLlamaForCausalLM" in log
        assert "load_format=gac" in log
        text = {"model": server.model, "prompt": "def f(", "max_tokens": 4}
        assert server.client().completions.create(**text).choices[0].text


def assert_logprobs(server: Server, model: nn.Module) -> None:
    """Check that top-5 logprobs match the model's within 1e-3, and that tokens are its best."""
    for prompt, (tokens, top) in zip(PROMPTS, server.completions(PROMPTS, 8), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for step, (token, served) in enumerate(zip(tokens, top, strict=True)):
            assert float(expected[step].max() - expected[step, token]) < 1e-3
            for candidate, logprob in served.items():
                assert logprob == pytest.approx(float(expected[step, candidate]), rel=1e-3)


@pytest.mark.slow
def test_a_server_with_a_broken_import_exits_with_the_reason(tmp_path: Path) -> None:
    written, model, _ = written_by_palu()
    missing = "model.layers.1.self_attn.v_proj.U.0.weight"
    directory = write(tmp_path / "model", written, model, change=lambda t: t.pop(missing))
    with (
        pytest.raises(ServerDiedError),
        serve(directory, tmp_path / "log", "--load-format", "gac", "--skip-tokenizer-init"),
    ):
        pass
    assert f"{missing}: missing, expected shape [128, 40]" in (tmp_path / "log").read_text()
