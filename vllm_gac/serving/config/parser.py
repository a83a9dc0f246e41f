"""The config parser for models that vLLM cannot serve by itself.

vLLM hands every config in Hugging Face's format to one parser, before it knows the model. Ours runs
first. It takes over two kinds: models that another tool wrote; and dense models of our families in
a local directory whose tensors have other shapes than config.json says, which vLLM would fail to
load. The config that it returns describes a gac model and travels to every process.
"""

from pathlib import Path
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, PreTrainedConfig
from vllm import envs
from vllm.logger import init_logger
from vllm.transformers_utils.config import HFConfigParser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_gac.checkpoint.hub import config_directory, model_directory
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import recognize
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES
from vllm_gac.serving.config.foreign_code import mentions_gac, refuse_foreign_code
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.preflight import open_to_serve

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# For these vLLM serves only tensors of the shapes in config.json.
_DENSE = tuple([family.architecture] for family in FAMILIES.values())


class GacConfigParser(ConfigParserBase):
    """Parses directories that only we can serve, and leaves the rest to the parser `before`."""

    before: ClassVar[type[ConfigParserBase]] = HFConfigParser

    def parse(
        self, model: str | Path, trust_remote_code: bool, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """config.json as a dict, and as transformers' config.

        Raises CheckpointError for a gac model that a class other than ours would serve.
        """
        revision = args[0] if args else kwargs.get("revision")
        fetched = None
        if is_from_another_tool(str(model), revision):
            # Its layout follows from its tensors: they are fetched before vLLM's loader needs them.
            fetched = model_directory(model, revision)
        raw = config_to_serve(fetched or Path(model), trust_remote_code)
        if raw is None:
            raw, config = self.before().parse(model, trust_remote_code, *args, **kwargs)
        else:
            config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw, name_or_path=str(model))
        refuse_foreign_code(model, raw, raw.get("architectures"), kwargs.get("hf_overrides"))
        if "gac" in raw and config.model_type in FAMILIES:
            config = GacConfig.adopt(config)
        return raw, config


def config_to_serve(directory: Path, trust_remote_code: bool = False) -> dict[str, Any] | None:
    """The config that describes `directory` as a gac model; None if vLLM reads it by itself.

    Raises:
        CheckpointError: Another tool wrote the directory and it is faulty, or config.json has a
            "gac" object and is not well-formed.
    """
    try:
        raw = read_json(directory / "config.json")
    except CheckpointError:
        if mentions_gac(directory / "config.json"):
            raise
        return None  # a model on the Hub, or a fault that vLLM explains better
    from_tool = recognize(raw) is not None
    if from_tool and trust_remote_code and raw.get("architectures") == ["DeciLMForCausalLM"]:
        return None  # vLLM serves this architecture if its authors' config class may run
    if not from_tool and not _may_differ(directory, raw):
        return None
    try:
        model_format, checkpoint = open_to_serve(directory)
    except CheckpointError:
        if from_tool:
            raise
        return None  # --load-format gac refuses it; vLLM's own formats decide themselves
    if model_format in ("gac", "dense"):
        return None
    logger.info("Serving a model in the format %s as %s", model_format, ARCHITECTURE)
    return dict(checkpoint.raw_config)


def is_from_another_tool(model: str, revision: str | None) -> bool:
    """Whether `model` is a model on the Hub that another tool wrote."""
    config = None if envs.VLLM_USE_MODELSCOPE else config_directory(model, revision)
    if config is None:
        return False
    try:
        return recognize(read_json(config / "config.json")) is not None
    except CheckpointError:
        return False  # a fault that vLLM explains better


def _may_differ(directory: Path, raw: dict[str, Any]) -> bool:
    """Whether the tensors beside a plain config may have shapes that it does not state."""
    quantized = "quantization_config" in raw or (directory / "hf_quant_config.json").exists()
    return raw.get("architectures") in _DENSE and not quantized
