"""Refuses RoPE that was changed after compression, in config.json or by --hf-overrides.

A layer whose RoPE pairs were selected or mixed has a table of its own frequencies. Such a change
would not reach it, and would apply to the other layers only.
"""

import json
from typing import TYPE_CHECKING, Any

import torch

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import HfConfig, validate
from vllm_gac.serving.loading.original_config import original_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_SPELLED_BYTES = 600


def check_rope(hf_config: "PreTrainedConfig") -> None:
    """Check that --hf-overrides changes RoPE of all layers or of none.

    Raises:
        CheckpointError: It changes RoPE and a layer has a table of its own, or it gives a key that
            is not read beside rope_parameters.
    """
    current, original = hf_config.to_dict(), original_config(hf_config)
    if original is None:
        return
    rope = current["rope_parameters"] or {}
    if rope.get("rope_theta") is None:
        raise CheckpointError(
            "--hf-overrides: removes rope_theta; add it to the RoPE parameters that you give"
        )
    layout = layout_of(original)
    layers = layout.layers
    beside = {key: current[key] for key in _BESIDE if current.get(key) is not None}
    overridden = current | {"rope_parameters": rope | beside}
    with_table = [index for index, layer in enumerate(layers) if layer.key.rope_table]
    if with_table and not torch.equal(
        *(_frequencies(raw, layout) for raw in (original, overridden))
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


def _frequencies(raw: dict[str, Any], layout: ModelLayout) -> torch.Tensor:
    return inverse_frequencies(validate(HfConfig, raw, "--hf-overrides").rope, layout.head_dim)
