"""Every config key that vLLM's models of these families read is honoured, refused or harmless."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

from tests.serving.models import HETEROGENEOUS, layout_with
from tests.support.dense_models import SCALED, config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.config_keys import REFUSED, REFUSED_IN_ROPE
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import FAMILIES
from vllm_gac.layout.schema import HfConfig, validate

VLLM = Path(vllm.__file__).parent
# All but those that vLLM serves by transformers' classes.
_OWN = FAMILIES.keys() - {"seed_oss", "smollm3"}
MODULES = {_TEXT_GENERATION_MODELS[FAMILIES[name].architecture][0] for name in _OWN}
SOURCES = (
    *(f"model_executor/models/{module}.py" for module in sorted(MODULES)),
    "model_executor/models/adapters.py",
    "config/model.py",
    "transformers_utils/model_arch_config_convertor.py:ModelArchConfigConvertorBase",
)
# The names of variables and attributes that hold a config in vLLM.
CONFIGS = {
    "config", "cfg", "hf_config", "hf_text_config", "text_config", "inner_hf_config",
    "inner_text_config",
}  # fmt: skip

# The keys that are not refused, by what becomes of them.
KEYS = {
    "honoured, or refused where they contradict others or say what is not served": """
        architectures attention_bias decoder_sparse_step head_dim hidden_act hidden_size
        intermediate_size layer_types llama_4_scaling max_position_embeddings max_window_layers
        mlp_bias mlp_only_layers model_type moe_intermediate_size norm_topk_prob
        num_attention_heads num_experts num_experts_per_tok num_hidden_layers num_key_value_heads
        original_max_position_embeddings qkv_bias quantization_config rms_norm_eps rope_parameters
        sliding_window tie_word_embeddings vocab_size""",
    "of models of other kinds, which layers like ours do not have": """
        attn_config attn_type_list block_configs chunk_size compress_ratios encoder_config
        kv_lora_rank layers_block_type mamba_chunk_size model position_encoding_type
        qk_nope_head_dim qk_rope_head_dim target_layer_count vision_config""",
    "limits the context, and nothing else; vLLM does so for us": """
        max_seq_len max_seq_length max_sequence_length max_target_positions model_max_length
        n_positions seq_len seq_length""",
    "of mixtures of experts of other families": """
        moe_num_experts moe_top_k moe_topk n_routed_experts num_experts_per_token
        num_local_experts top_k top_k_experts""",
    "of pooling, which is vLLM's own and comes after the last layer": """
        classifier_from_token embedding_size is_matryoshka matryoshka_dimensions method
        num_labels position_embedding_type projection_dim projection_size use_pad_token
        use_sep_token word_embed_proj_dim""",
    "vLLM's idea of the model's heads; caches and kernels go by our layers'": """
        hidden_size_per_head multi_query_group_num n_head_kv num_attention_groups num_kv_heads""",
    "made a gac model by an importer": "is_heterogeneous per_layer_config",
    "read only with ada_rms_norm_t_cond, which is refused": "ada_rms_norm_t_cond_dim",
    "an old name; packed tensors under it are refused as strangers": "compression_config",
    "a dtype or a name, of the server's choice": "dtype head_dtype name_or_path",
}
KNOWN = {key for keys in KEYS.values() for key in keys.split()}
# What only one of the supported releases reads.
OF_ONE_RELEASE = {"compress_ratios", "top_k", "word_embed_proj_dim"}
# Methods of a config, and attributes that are no keys.
NOT_KEYS = frozenset(["get", "get_text_config", "to_diff_dict", "update"])


def keys_read(tree: ast.AST, aliases: Mapping[str, list[str]] | None = None) -> Iterator[str]:
    """The names of attributes that a source reads from configs, also in loops over names.

    `aliases` are lists of names by the name that the source has for each list.
    """
    aliases = aliases or {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        lists = dict(_lists_by_name(nodes))
        for node in nodes:
            if isinstance(node, ast.Attribute) and _is_config(node.value):
                yield node.attr
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "getattr_iter",
                "hasattr",
            ):
                owner, name = node.args[:2]
                if _is_config(owner):
                    for key in lists.get(getattr(name, "id", ""), _constants(name)):
                        yield from aliases.get(key, [key])


def _lists_by_name(nodes: list[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    lists: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            lists[node.targets[0].id] = _constants(node.value)
    for node in nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            lists[node.target.id] = lists.get(getattr(node.iter, "id", ""), [])
    yield from lists.items()


def _constants(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is str]


def _aliases() -> dict[str, list[str]]:
    """vLLM's lists of the names that models have for one key; 0.32 writes them where it reads."""
    for node in ast.parse((VLLM / "transformers_utils/config.py").read_text()).body:
        name = getattr(getattr(node, "target", None), "id", "")
        value = getattr(node, "value", None)
        if name == "CONFIG_FIELD_ALIASES" and isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
            return {_constants(key)[0]: _constants(names) for key, names in pairs if key}
    return {}


def _is_config(node: ast.AST) -> bool:
    return getattr(node, "id", None) in CONFIGS or getattr(node, "attr", None) in CONFIGS


def _source(path: str) -> ast.AST:
    file, _, name = path.partition(":")
    tree = ast.parse((VLLM / file).read_text())
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == name) if name else tree


def test_no_key_that_vllm_reads_is_unknown_to_us() -> None:
    aliases = _aliases()
    read = {key for path in SOURCES for key in keys_read(_source(path), aliases)}
    read -= NOT_KEYS | CONFIGS
    assert {"is_causal", "layer_types", "logit_scale", "llama_4_scaling", "n_positions"} <= read
    assert read - KNOWN - REFUSED.keys() == set()
    # Keys that vLLM no longer reads must not be in the table. Its RoPE reads these.
    assert REFUSED.keys() - read == {"rotary_emb_base", "rotary_emb_fraction", "rotary_pct"}
    assert KNOWN - read - OF_ONE_RELEASE == set()


AT_WORK: dict[str, Any] = {
    "alibi": True,
    "ada_rms_norm_t_cond": True,
    "bias": True,
    "is_causal": False,
    "is_mm_prefix_lm": True,
    "logit_scale": 0.5,
    "qk_norm": True,
}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_key_that_we_do_not_serve_is_refused_of_dense_and_gac_models(key: str) -> None:
    changes = {key: AT_WORK.get(key, 7)}
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: "):
        layout_of(config(**changes))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: "):
        layout_with(HETEROGENEOUS[:1], **changes)
    for harmless in (None, *REFUSED[key]):
        layout_of(config(**{key: harmless}))


@pytest.mark.parametrize("key", sorted(REFUSED_IN_ROPE))
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_an_unknown_parameter_of_rope_is_refused(key: str, spelling: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, key: [16, 24, 24]}
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: "):
        layout_of(config(**{spelling: rope}))


QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 64}
WINDOWED: dict[str, Any] = QWEN2 | {"use_sliding_window": True}
PHI3: dict[str, Any] = {"model_type": "phi3"}
MINISTRAL: dict[str, Any] = {"model_type": "ministral3"}
EXPERTS: dict[str, Any] = {"model_type": "qwen3_moe"}
SMOLLM: dict[str, Any] = {"model_type": "smollm3"}
SAID = {"beta": 0.5, "original_max_position_embeddings": 16}  # as vLLM spells it


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"qkv_bias": True}, "qkv_bias"),
        ({"sliding_window": 64}, "sliding_window"),
        (
            {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "layer_types": ["full_attention"] * 2},
            "sliding_window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "use_sliding_window": False},
            "sliding_window",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": 7}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": []}, "layer_types"),
        ({"hidden_act": None}, "hidden_act"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"use_cache": "yes"}, "use_cache"),
        ({"eos_token_id": "2"}, "eos_token_id.int"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        (WINDOWED | {"max_window_layers": 1}, "sliding_window"),
        (WINDOWED | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (PHI3 | {"rope_scaling": {"type": "longrope"}}, "rope_type"),
        (PHI3 | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        (PHI3 | {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        (PHI3 | {"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": SCALED}, "llama_4_scaling_beta"),
        ({"llama_4_scaling": SAID}, "llama_4_scaling_beta"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias"),
        ({"model_type": "seed_oss", "attention_bias": False}, "attention_bias"),
        (MINISTRAL | {"rope_parameters": None}, "llama_4_scaling_beta"),
        (MINISTRAL | {"llama_4_scaling": SAID | {"beta": 1}}, "llama_4_scaling_beta"),
        (MINISTRAL | {"llama_4_scaling": True}, "llama_4_scaling"),
        (MINISTRAL | {"rope_parameters": {"llama_4_scaling_beta": 0.5}}, "rope"),
        (SMOLLM | {"no_rope_layers": [1]}, "no_rope_layers"),
        (SMOLLM | {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        (SMOLLM | {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (SMOLLM | {"sliding_window": 64, "use_sliding_window": True}, "use_sliding_window"),
        (SMOLLM | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (SMOLLM | {"rope_parameters": None}, "rope_theta"),
        (EXPERTS | {"mlp_only_layers": [1]}, "mlp_only_layers, decoder_sparse_step"),
        (EXPERTS | {"decoder_sparse_step": 2}, "mlp_only_layers, decoder_sparse_step"),
        (EXPERTS | {"use_sliding_window": True}, "use_sliding_window"),
        (EXPERTS | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (EXPERTS | {"num_local_experts": 4}, "num_experts"),
        (EXPERTS | {"num_experts": None}, r"experts\.num_experts"),
        (EXPERTS | {"num_experts_per_tok": 9}, "experts: num_experts_per_tok"),
        (EXPERTS | {"moe_intermediate_size": 0}, r"experts\.moe_intermediate_size"),
        (EXPERTS | {"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_combinations_of_keys_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: "):
        layout_of(config(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"use_sliding_window": False, "max_window_layers": 0}, None),
        ({"use_sliding_window": True}, None),  # from layer 28 on, and there are two
        ({"use_sliding_window": True, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_the_window_of_a_qwen2_is_that_of_transformers(
    changes: dict[str, Any], expected: int | None
) -> None:
    from transformers import Qwen2Config

    raw = config(**QWEN2 | changes)
    assert validate(HfConfig, raw, "config.json").sliding_window == expected
    theirs = Qwen2Config.from_dict(raw)
    windowed = "sliding_attention" in theirs.layer_types and theirs.sliding_window
    assert (windowed or None) == expected


@pytest.mark.parametrize(
    "said", [{"no_rope_layer_interval": 3}, {"no_rope_layers": [0, 1, 1, 0, 0, 1]}]
)
def test_the_layers_without_rope_are_those_of_transformers(said: dict[str, Any]) -> None:
    from transformers import SmolLM3Config

    raw = config(**SMOLLM, num_hidden_layers=5, **said)
    theirs = SmolLM3Config.from_dict(raw).no_rope_layers[:5]
    assert [layer.has_rope for layer in layout_of(raw).layers] == [bool(x) for x in theirs]


def test_windows_of_all_layers_or_none_are_honoured() -> None:
    def window(**changes: Any) -> int | None:
        return validate(HfConfig, config(**changes), "config.json").sliding_window

    assert window(model_type="mistral", sliding_window=64) == 64
    sliding = ["sliding_attention"] * 2
    assert window(model_type="mistral", sliding_window=64, layer_types=sliding) == 64
    assert window(layer_types=["full_attention"] * 2) is None
    assert window(sliding_window=256, use_sliding_window=False) == 256  # the length of the context


def test_the_demo_and_what_transformers_writes_are_served() -> None:
    from transformers import CONFIG_MAPPING

    for model_type in FAMILIES:
        made = CONFIG_MAPPING[model_type]()
        layout_of(json.loads(made.to_json_string(use_diff=False)))
    layout_of(config(**MINISTRAL, llama_4_scaling=SAID))
