"""Stands in for vLLM's ModelConfig in tests without an engine."""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig


class ModelConfigStub:
    """The attributes that the loader reads. The config is `raw`, or that of the directory."""

    def __init__(self, directory: Path, raw: dict[str, Any] | None = None) -> None:
        self.model = str(directory)
        self.revision = None
        if raw is None:
            self.hf_config = AutoConfig.from_pretrained(directory)
        else:
            self.hf_config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
