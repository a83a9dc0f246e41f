"""What --hf-overrides and other options made of config.json: resolved, or refused.

The tensors have the dims of config.json. Most overrides of dims would have no effect, because the
"gac" object has the dims of every layer; others would fail later at a tensor's shape, with an error
that does not name the option.

transformers' configs read most keys about windows once, when config.json is read. vLLM changes the
keys of the finished config, and then reads `sliding_window` and `layer_types` only.

A layer whose RoPE pairs were selected or mixed has a table of its own frequencies. A change of RoPE
would not reach it, and would apply to the other layers only.
"""

import json
from typing import Any

import torch

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.rope import inverse_frequencies
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
_ROPE = ("rope_parameters", "rope_scaling")
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_SPELLED_BYTES = 600


def resolve_overrides(config: GacConfig) -> None:
    """Check what options made of a gac model's config; let all keys about windows agree.

    Args:
        config: The config as vLLM overrode it, before dims are padded.

    Raises:
        CheckpointError: An option changes what the tensors depend on, or would have no effect, or
            the config is faulty.
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
    """Check that options do no more to windows than to leave them out, and do so in all keys.

    Without a window, by --disable-sliding-window or an override, no layer has one.

    Raises:
        CheckpointError: An override changes a key about windows otherwise.
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
    """Check that --hf-overrides changes RoPE of all layers or of none.

    Raises:
        CheckpointError: It changes RoPE and a layer has a table of its own, or it gives a key that
            is not read beside rope_parameters.
    """
    if all(current.get(key) == original.get(key) for key in (*_ROPE, *_BESIDE)):
        return
    rope = current["rope_parameters"] or {}
    if rope.get("rope_theta") is None:
        raise CheckpointError(
            "--hf-overrides: removes rope_theta; add it to the RoPE parameters that you give"
        )
    layout = layout_of(original)
    layers, head_dim = layout.layers, layout.head_dim
    beside = {key: current[key] for key in _BESIDE if current.get(key) is not None}
    overridden = current | {"rope_parameters": rope | beside}
    with_table = [index for index, layer in enumerate(layers) if layer.key.rope_table]
    if with_table and not torch.equal(
        *(_frequencies(raw, head_dim) for raw in (original, overridden))
    ):
        raise CheckpointError(
            f"--hf-overrides: changes RoPE, but {len(with_table)} of {len(layers)} layers, first "
            f"layer {with_table[0]}, have frequencies of their own (self_attn.rope_inv_freq); "
            "change it in the dense model's config.json, and compress again"
        )
    for key, value in beside.items():
        if rope.get(key) != value != original.get(key):
            spelled = json.dumps({"rope_parameters": rope | beside})
            raise CheckpointError(
                f"--hf-overrides: changes {key} to {sanitize(value)} and leaves rope_parameters as "
                f"they are, which have it, too; give '{sanitize(spelled, _SPELLED_BYTES)}'"
            )


def _frequencies(raw: dict[str, Any], head_dim: int) -> torch.Tensor:
    return inverse_frequencies(validate(HfConfig, raw, "--hf-overrides").rope, head_dim)
