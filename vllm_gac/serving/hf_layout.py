"""The layouts in a transformers config: what is served, and what the files have.

They differ where dims are padded at load time. Both travel with the config to every process, so
that loading, reloading, quantization and sleeping go by the same ones.
"""

from typing import TYPE_CHECKING

from vllm_gac.layout import ModelLayout, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The "gac" object as the files have it, where what is served is padded.
_STORED = "gac_stored"


def layout_of_hf(hf_config: "PreTrainedConfig") -> ModelLayout:
    """The layout to serve. Raises CheckpointError."""
    return layout_of(hf_config.to_dict(), _where(hf_config))


def stored_layout(hf_config: "PreTrainedConfig") -> ModelLayout:
    """The layout that the files have. Raises CheckpointError."""
    raw = hf_config.to_dict()
    return layout_of(raw | {"gac": raw.get(_STORED, raw.get("gac"))}, _where(hf_config))


def serve_padded(hf_config: "PreTrainedConfig", padded: ModelLayout) -> None:
    """Make `padded` the layout to serve, and keep the one that the files have."""
    stored = getattr(hf_config, _STORED, hf_config.gac)
    setattr(hf_config, _STORED, stored)
    hf_config.gac = padded.section(stored.get("source"))
    hf_config.head_dim = padded.cache_head_dim


def _where(hf_config: "PreTrainedConfig") -> str:
    name = hf_config.name_or_path
    return f"{name}/config.json" if name else "config.json"
