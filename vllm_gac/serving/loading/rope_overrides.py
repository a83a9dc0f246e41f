"""Refuses RoPE that was changed after compression, in config.json or by --hf-overrides.

A layer whose RoPE pairs were selected or mixed has a table of its own frequencies. Such a change
would not reach it, and would apply to the other layers only.
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

# Relative difference of one frequency, computed on two machines.
_ROUNDING = 1e-5
_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def check_rope(hf_config: "PreTrainedConfig") -> None:
    """Raise CheckpointError if --hf-overrides changes RoPE and a layer has a table of its own."""
    current, original = hf_config.to_dict(), as_read(hf_config)
    if original is None:
        return
    if (current["rope_parameters"] or {}).get("rope_theta") is None:
        raise CheckpointError(
            "--hf-overrides: removes rope_theta; add it to the RoPE parameters that you give"
        )
    layout = stored_layout(hf_config)
    layers = layout.layers
    with_table = [index for index, layer in enumerate(layers) if layer.key.rope_table]
    if not with_table:
        return
    before = {key: value for key, value in current.items() if key not in _KEYS}
    before |= {key: original[key] for key in _KEYS if key in original}
    frequencies = (
        inverse_frequencies(validate(HfConfig, raw, "--hf-overrides").rope, layout.head_dim)
        for raw in (before, current)
    )
    if not torch.equal(*frequencies):
        raise CheckpointError(
            f"--hf-overrides: changes RoPE, but {len(with_table)} of {len(layers)} layers, first "
            f"layer {with_table[0]}, have frequencies of their own (self_attn.rope_inv_freq); "
            "change it in the dense model's config.json, and compress again"
        )


def chosen_from(hf_config: "PreTrainedConfig") -> torch.Tensor | None:
    """The frequencies of config.json from which vllm-gac chose those of the tables.

    Returns:
        fp32 [pairs]; None if another tool wrote the tables, which may then hold any frequencies.
    """
    raw = hf_config.to_dict()
    source = (raw.get("gac") or {}).get("source", {})
    if not str(source.get("tool")).startswith("vllm-gac "):
        return None
    rope = validate(HfConfig, raw, "config.json").rope
    return inverse_frequencies(rope, stored_layout(hf_config).head_dim)


def check_table(name: str, table: torch.Tensor, frequencies: torch.Tensor) -> None:
    """Check that a RoPE table holds frequencies of config.json only.

    Args:
        name: The table's tensor name, for the error.
        table: fp32 [key heads or 1, pairs]; padded pairs are 0.
        frequencies: The frequencies of config.json, fp32 [pairs of the dense model].

    Raises:
        CheckpointError: The table has another frequency.
    """
    chosen = table[table != 0]
    if ((chosen[:, None] - frequencies).abs().amin(1) > _ROUNDING * chosen).any():
        raise CheckpointError(
            f"{name}: has frequencies that RoPE of config.json does not have, so one of them was "
            "changed after compression; restore config.json, or change RoPE in the dense model's "
            "and compress again"
        )
