"""The config.json of a gac model as it was read: what options change, vLLM changes later."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_AS_READ = "gac_as_read"


def keep_as_read(hf_config: "PreTrainedConfig") -> None:
    """Keep the keys and values of a config that has just been read."""
    setattr(hf_config, _AS_READ, hf_config.to_dict())


def as_read(hf_config: "PreTrainedConfig") -> dict[str, Any] | None:
    """The keys and values that were kept; None if none were."""
    kept: dict[str, Any] | None = getattr(hf_config, _AS_READ, None)
    return kept
