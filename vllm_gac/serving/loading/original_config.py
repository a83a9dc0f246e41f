"""Keeps the config.json of a gac model as it was read, before vLLM applies options to it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KEY = "gac_original_config"


def keep_original_config(hf_config: "PreTrainedConfig") -> None:
    """Store a copy of all keys and values of a config that has just been read."""
    setattr(hf_config, _KEY, hf_config.to_dict())


def original_config(hf_config: "PreTrainedConfig") -> dict[str, Any] | None:
    """The keys and values that `keep_original_config` stored; None if it was not called."""
    original: dict[str, Any] | None = getattr(hf_config, _KEY, None)
    return original
