"""The keys of a config.json in one spelling, and those with which no model is served.

If one engine honours a key and another ignores it, they compute different models from the same
directory. So compression and serving refuse such keys. tests/layout/test_config_keys.py reads
vLLM's sources. It fails for a key that we neither honour, nor refuse, nor know to be harmless.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_gac.layout.families import FAMILIES, NAMES, WITH_VISION, Family

_MAX_LAYERS = 1024
# Each key with the values that change nothing. null is always allowed.
REFUSED: dict[str, tuple[object, ...]] = {
    "ada_rms_norm_t_cond": (False,),
    "alibi": (False,),
    "attention_chunk_size": (),
    "bias": (False,),
    "canvas_length": (),
    "dual_chunk_attention_config": (),
    "is_causal": (True,),
    "is_mm_prefix_lm": (False,),
    "logit_scale": (1,),
    "qk_norm": (False,),
    "rotary_emb_base": (),
    "rotary_emb_fraction": (),
    "rotary_pct": (),
    "rswa_window": (),
    "shared_expert_intermediate_size": (0,),
}
# The same for the keys of RoPE parameters.
REFUSED_IN_ROPE: dict[str, tuple[object, ...]] = {
    "mrope_section": (),
    "rope_dim": (),
    "use_fope": (False,),
}

# In most keys null is as if they were missing. In these transformers, hence vLLM, refuses it.
_NOT_NULL = frozenset(
    {"hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "use_cache"}
)

_NAME = re.compile(r"[\w.+-]{1,60}")


def canonical_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json, with what transformers derives, and RoPE and experts by one name.

    Raises:
        ValueError: The first key with which a model is not served.
    """
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None and isinstance(model_type, str) and _NAME.fullmatch(model_type):
        raise ValueError(_other_family(model_type))
    given = {**family.defaults, **raw} if family else raw
    filled = {k: v for k, v in given.items() if v is not None or k in _NOT_NULL}
    if "torch_dtype" in filled:
        filled.setdefault("dtype", filled["torch_dtype"])
    heads, hidden = filled.get("num_attention_heads"), filled.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        filled.setdefault("num_key_value_heads", heads)
        filled.setdefault("head_dim", hidden // heads)
    _refuse(filled, REFUSED)
    if family:
        _refuse_of_family(filled, family)
    if not (family and family.reads_use_sliding_window):
        if filled.get("qkv_bias", (bias := filled.get("attention_bias", False))) != bias:
            raise ValueError(
                f"qkv_bias: is {filled['qkv_bias']!r} and attention_bias {bias!r}; only models "
                "with all four biases of attention or none are served"
            )
        _refuse_odd_window(filled)
    filled["rope"] = rope = _rope(filled)
    if family and isinstance(rope, dict):
        _refuse_odd_rope(rope, family)
        rope["layers"] = _rope_layers(filled) if family.skips_rope else None
    filled["experts"] = _experts(filled) if family and family.has_experts else None
    if family and family.reads_use_sliding_window and not any(_windowed_layers(filled)):
        filled.pop("sliding_window", None)
    return filled


def _other_family(model_type: str) -> str:
    if model_type == WITH_VISION:
        return (
            f"model_type {model_type} is a text model beside a vision model; 'vllm-gac export' "
            "writes the text model alone"
        )
    return (
        f"model_type {model_type} is not supported yet; {NAMES} are. To serve such a model as it "
        "is, leave vllm-gac and --load-format gac out"
    )


def _refuse_of_family(config: Mapping[str, Any], family: Family) -> None:
    if family.qkv_bias is False and config.get("attention_bias"):
        raise ValueError(
            "attention_bias: is true, with which transformers and vLLM give different linears a "
            f"bias; {family.name} models without biases are served"
        )
    for key, value in family.only.items():
        if config.get(key, value) is not value:
            raise ValueError(
                f"{key}: is {str(config[key])[:60]}; a {family.name} with {str(value).lower()} is "
                "served, as all that were released have"
            )
    if family.has_experts:
        _refuse_other_layers(config)
    if family.reads_use_sliding_window:
        _refuse_mixed_windows(config)


def _rope(config: dict[str, Any]) -> Any:
    """RoPE parameters of a config, in any of its spellings.

    Spellings that contradict each other are refused, because engines differ in which one they use.
    """
    rope: dict[str, Any] = {}
    for spelling in ("rope_parameters", "rope_scaling"):
        raw = config.get(spelling) or {}
        if not isinstance(raw, dict):
            return raw
        given = {k: v for k, v in raw.items() if v is not None}
        if any(isinstance(v, dict) for v in given.values()):
            raise ValueError("RoPE parameters by layer type are not supported")
        oldest = given.get("type")  # of rope_type
        if oldest is not None and given.setdefault("rope_type", oldest) != oldest:
            raise ValueError(
                f"{spelling}: rope_type is {given['rope_type']!r}, its old spelling type "
                f"{oldest!r}; let them agree"
            )
        _refuse(given, REFUSED_IN_ROPE)
        if given.get("rope_type") in ("longrope", "su"):
            raise ValueError(
                "rope_type: LongRoPE turns by one table of frequencies in short contexts and by "
                "another in long ones; served is one table for all"
            )
        _agree(rope, given, f"their old spelling {spelling}")
    if (scaling := config.get("llama_4_scaling")) is not None:  # as vLLM spells it
        if not isinstance(scaling, dict):
            raise ValueError(f"llama_4_scaling: expected an object, got {str(scaling)[:60]!r}")
        said = {"llama_4_scaling_beta": scaling.get("beta")}
        context = "original_max_position_embeddings"
        _agree(rope, said | {context: scaling.get(context)}, "the key llama_4_scaling beside them")
    beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    _agree(rope, {name: config[name] for name in beside if name in config}, "the key beside them")
    return rope


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `Experts`. transformers 5 writes the number of experts by another name."""
    count, also = config.get("num_experts"), config.get("num_local_experts")
    if None not in (count, also) and count != also:
        raise ValueError(f"num_experts: is {count!r}, num_local_experts {also!r}; let them agree")
    return config | {"num_experts": also if count is None else count}


def _rope_layers(config: Mapping[str, Any]) -> list[bool] | None:
    """Which layers have RoPE: 1 in `no_rope_layers` says that one has, as transformers reads it."""
    count, every = config.get("num_hidden_layers"), config.get("no_rope_layer_interval")
    if not isinstance(count, int):
        return None
    kinds = config.get("no_rope_layers")
    if kinds is None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"no_rope_layer_interval: expected 1 or more, got {str(every)[:60]!r}")
        return [(index + 1) % every != 0 for index in range(min(count, _MAX_LAYERS))]
    if not isinstance(kinds, list) or len(kinds) < count or any(k not in (0, 1) for k in kinds):
        raise ValueError(
            f"no_rope_layers: expected 1 for each of {count} layers with RoPE and 0 for one "
            f"without, got {str(kinds)[:60]!r}"
        )
    return [kind == 1 for kind in kinds[:count]]


def _agree(rope: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Add what `where` gives to `rope`. Raises ValueError where it says something else."""
    for name, value in given.items():
        if rope.setdefault(name, value) != value:
            raise ValueError(
                f"{name}: rope_parameters say {rope[name]!r}, {where} says {value!r}; "
                "let them agree"
            )


def _refuse_odd_rope(rope: Mapping[str, Any], family: Family) -> None:
    """Refuse RoPE of a part of each head, or with more or less than the family has."""
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(
            f"partial_rotary_factor: is {str(part)[:60]}; calibration, latent keys and kernels "
            "turn whole heads, so models that turn a part of each are not served"
        )
    if family.only_default_rope and (kind := rope.get("rope_type", "default")) != "default":
        raise ValueError(
            f"rope_type: is {str(kind)[:60]!r}, which transformers refuses for a {family.name} or "
            "reads as LongRoPE; the default type is served"
        )
    if family.scales_queries != ("llama_4_scaling_beta" in rope):
        scaled = [other.name for other in FAMILIES.values() if other.scales_queries]
        raise ValueError(
            "llama_4_scaling_beta: in rope_parameters it says how queries are scaled by their "
            f"position, as those of {' and '.join(scaled)} are, and no others; this is a "
            f"{family.name}: {'add' if family.scales_queries else 'remove'} it"
        )
    if family.needs_rope_theta and "rope_theta" not in rope:
        raise ValueError(
            f"rope_theta: missing; for a {family.name} transformers and vLLM may take another "
            "than 10,000, so say which the model was trained with"
        )


def _refuse(given: Mapping[str, Any], refused: Mapping[str, tuple[object, ...]]) -> None:
    for key, harmless in refused.items():
        value = given.get(key)
        if value is not None and value not in harmless:
            rest = f"; served are {' and '.join(map(repr, harmless))}" if harmless else ""
            raise ValueError(f"{key}: models with {str(value)[:60]!r} are not served{rest}")


def _refuse_other_layers(config: Mapping[str, Any]) -> None:
    """Refuse a mixture of experts that some layers lack, or that has a window."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            "mlp_only_layers, decoder_sparse_step: say that some layers have no experts; served "
            "are models whose layers all have some"
        )
    if config.get("use_sliding_window"):
        raise ValueError(
            "use_sliding_window: is true; mixtures of experts whose layers attend to all tokens "
            "are served"
        )


def _windowed_layers(config: Mapping[str, Any]) -> list[bool]:
    """Which layers have the window, in families that read `use_sliding_window`.

    As transformers' config classes say, which vLLM uses: `layer_types` or, without it, the layers
    from `max_window_layers` on.
    """
    layers, first = config.get("num_hidden_layers"), config.get("max_window_layers")
    if not config.get("use_sliding_window") or "sliding_window" not in config:
        return []
    if kinds := _layer_types(config):
        return [kind == "sliding_attention" for kind in kinds]
    if not isinstance(layers, int) or not isinstance(first, int):
        return []
    return [index >= first for index in range(min(layers, _MAX_LAYERS))]


def _refuse_mixed_windows(config: Mapping[str, Any]) -> None:
    """Refuse a window that only some layers have. vLLM's own Qwen2 and Qwen3 refuse it, too."""
    kinds, windowed = _layer_types(config), _windowed_layers(config)
    if "sliding_attention" in kinds and not windowed:
        raise ValueError(
            "layer_types: has layers with sliding_attention, but use_sliding_window or "
            "sliding_window says that there is no window; let them agree"
        )
    if len(set(windowed)) > 1:
        raise ValueError(
            f"sliding_window: is {config['sliding_window']} in {sum(windowed)} of {len(windowed)} "
            "layers only; served is one for all layers or none. If no prompt is longer than the "
            "window, set use_sliding_window to false"
        )


def _layer_types(config: Mapping[str, Any]) -> list[Any]:
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list):
        raise ValueError(f"layer_types: expected a list, got {str(kinds)[:60]!r}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types: layers with {str(kind)[:60]!r} are not served")
    layers = config.get("num_hidden_layers")
    if "layer_types" in config and len(kinds) != layers:
        raise ValueError(f"layer_types: {len(kinds)} layers, num_hidden_layers says {layers}")
    return kinds


def _refuse_odd_window(config: Mapping[str, Any]) -> None:
    """Refuse a sliding window that only some layers have, or that engines treat differently."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    kinds = _layer_types(config)
    if not isinstance(window, int) or (isinstance(context, int) and window >= context):
        return
    what = f"sliding_window: is {window}, but"
    if "full_attention" in kinds:
        raise ValueError(f"{what} layer_types has layers without one; served is one for all layers")
    if config.get("use_sliding_window") is False:
        raise ValueError(f"{what} use_sliding_window is false, which vLLM does not read; drop both")
    if config.get("model_type") == "llama":
        raise ValueError(
            f"{what} model_type is llama, whose window vLLM honours and transformers does not; "
            "drop it, or set model_type to mistral"
        )
