"""What --hf-overrides and other options made of config.json: resolved, or refused.

The tensors have the dims of config.json. Most overrides of dims would have no effect, because the
"gac" object has the dims of every layer; others would fail later at a tensor's shape, with an error
that does not name the option.

transformers' configs read most keys about windows once, when config.json is read. vLLM changes the
keys of the finished config, and then reads `sliding_window` and `layer_types` only.

A layer whose RoPE pairs were selected or mixed has a table of its own frequencies. A change of RoPE
would not reach it, so none is taken.
"""

from typing import Any

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.schema import HfConfig, validate
from vllm_gac.serving.gac_config import GacConfig

# The keys that vllm_gac.layout.dims reads.
FIXED = (
    "gac",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)
# The same of a mixture of experts, whose number has two names.
FIXED_OF_EXPERTS = ("moe_intermediate_size", "num_experts", "num_local_experts")
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROPE = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "no_rope_layers",
)


def resolve_overrides(config: GacConfig) -> None:
    """Check what options made of a gac model's config; let all keys about windows agree.

    `config` is as vLLM overrode it, before dims are padded. Raises CheckpointError if an option
    changes what the tensors depend on, or would have no effect, or the config is faulty.
    """
    original, current = config.original, config.to_dict()
    _check_dims(original, current)
    _resolve_window(config, original, current)
    _check_rope(original, current)
    config.check_overridden()


def _check_dims(original: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CheckpointError unless options left the dims alone."""
    for key in (*FIXED, *FIXED_OF_EXPERTS):
        before, after = original.get(key), current.get(key)
        if before != after:
            changed = "" if key == "gac" else f" from {sanitize(before)} to {sanitize(after)}"
            raise CheckpointError(
                f"--hf-overrides: changes {key}{changed}, but the tensors of a gac model have the "
                "dims that its config.json says; leave it out"
            )


def _resolve_window(config: GacConfig, original: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CheckpointError if options do more to windows than to leave them out.

    Without a window, by --disable-sliding-window or an override, no layer has one by any key.
    """
    kinds = original.get("layer_types") or []
    if current.get("sliding_window") is None and original.get("sliding_window") is not None:
        if "sliding_attention" in kinds:
            config.layer_types = ["full_attention"] * len(kinds)
            config.use_sliding_window = False
        return
    for key in _WINDOW:
        if (value := current.get(key)) != original.get(key):
            raise CheckpointError(
                f"--hf-overrides: changes {key} to {sanitize(value)}, which vLLM may not read "
                "after config.json is read; change it there, or for no window, give "
                '{"sliding_window": null}'
            )


def _check_rope(original: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise CheckpointError if options change RoPE."""
    if all(current.get(key) == original.get(key) for key in _ROPE):
        return
    before, after = (validate(HfConfig, raw, "--hf-overrides").rope for raw in (original, current))
    if before != after:
        raise CheckpointError(
            "--hf-overrides: changes RoPE, and a compressed layer may have frequencies of its own; "
            "change it in the dense model's config.json, and compress again"
        )
