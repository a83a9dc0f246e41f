"""RoPE that was changed after the model was compressed, in config.json or by --hf-overrides.

A layer whose pairs were selected or mixed has frequencies of its own, which no such change reaches:
it would hold for the other layers only.
"""

from typing import TYPE_CHECKING

import torch

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import HfConfig, validate
from vllm_gac.serving.hf_layouts import stored_layout
from vllm_gac.serving.loading.as_read import as_read

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Relative error between two machines that compute the same frequency.
_ROUNDING = 1e-5
_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def check_rope(hf_config: "PreTrainedConfig") -> None:
    """Raise CheckpointError if RoPE was overridden that layers with a table do not follow."""
    now, read = hf_config.to_dict(), as_read(hf_config)
    if read is None:
        return
    if (now["rope_parameters"] or {}).get("rope_theta") is None:
        raise CheckpointError(
            "--hf-overrides: takes rope_theta away; write it into the RoPE that it gives"
        )
    layout = stored_layout(hf_config)
    layers = layout.layers
    with_table = [index for index, layer in enumerate(layers) if layer.key.rope_table]
    if not with_table:
        return
    before = {key: value for key, value in now.items() if key not in _KEYS}
    before |= {key: read[key] for key in _KEYS if key in read}
    frequencies = (
        inverse_frequencies(validate(HfConfig, raw, "--hf-overrides").rope, layout.head_dim)
        for raw in (before, now)
    )
    if not torch.equal(*frequencies):
        raise CheckpointError(
            f"--hf-overrides: changes RoPE, but {len(with_table)} of {len(layers)} layers, the "
            f"first is {with_table[0]}, have frequencies of their own (self_attn.rope_inv_freq); "
            "change it in the dense model's config.json, and compress again"
        )


def chosen_from(hf_config: "PreTrainedConfig") -> torch.Tensor | None:
    """The frequencies of a model's RoPE, if they are what we chose those of its tables from.

    None for tables that others wrote, which may hold any frequencies.
    """
    raw = hf_config.to_dict()
    source = (raw.get("gac") or {}).get("source", {})
    if not str(source.get("tool")).startswith("vllm-gac "):
        return None
    rope = validate(HfConfig, raw, "config.json").rope
    return inverse_frequencies(rope, stored_layout(hf_config).head_dim)


def check_table(name: str, table: torch.Tensor, own: torch.Tensor) -> None:
    """Raise CheckpointError if a `table` is of another RoPE than the frequencies `own`."""
    chosen = table[table != 0]  # of padded pairs it is 0
    if ((chosen[:, None] - own).abs().amin(1) > _ROUNDING * chosen).any():
        raise CheckpointError(
            f"{name}: has frequencies that RoPE of config.json does not have, so one of them was "
            "changed after compression; restore config.json, or change RoPE in the dense model's "
            "and compress again"
        )
