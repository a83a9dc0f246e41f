"""How vLLM reads the config.json of models that it could not serve by itself.

vLLM hands every config of Hugging Face's format to one parser, before it knows the model. Ours
goes first: it looks at local directories only, and takes over those that another tool wrote, and
Llamas and Mistrals whose tensors have other shapes than config.json says, at which vLLM would
stop. The config it returns describes a gac model, and travels to every process from there.
"""

from pathlib import Path
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, PreTrainedConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import HFConfigParser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import recognize
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.serving.config.foreign_code import refuse_foreign_code, speaks_of_gac
from vllm_gac.serving.loading.as_read import keep_as_read
from vllm_gac.serving.loading.preflight import open_to_serve

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# Of these vLLM serves only tensors of the shapes that the config says.
_DENSE = (["LlamaForCausalLM"], ["MistralForCausalLM"])


class GacConfigParser(ConfigParserBase):
    """The parser there was before, but for the directories that only we can serve."""

    before: ClassVar[type[ConfigParserBase]] = HFConfigParser

    def parse(
        self, model: str | Path, trust_remote_code: bool, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """config.json as a dict, and as transformers' config.

        Raises CheckpointError for a gac model that other code than ours would serve.
        """
        raw = config_to_serve(Path(model), trust_remote_code)
        if raw is None:
            raw, config = self.before().parse(model, trust_remote_code, *args, **kwargs)
        else:
            config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw, name_or_path=str(model))
        refuse_foreign_code(model, raw, raw.get("architectures"), kwargs.get("hf_overrides"))
        if "gac" in raw:
            keep_as_read(config)
        return raw, config


def config_to_serve(directory: Path, trust_remote_code: bool = False) -> dict[str, Any] | None:
    """The config that makes a gac model of `directory`; None for one that vLLM shall read itself.

    Raises CheckpointError for a directory that another tool wrote and that makes no sense, and for
    a "gac" object in a config.json that is not well-formed.
    """
    try:
        raw = read_json(directory / "config.json")
    except CheckpointError:
        if speaks_of_gac(directory / "config.json"):
            raise
        return None  # a model on the Hub, or one that vLLM says more about
    by_tool = recognize(raw) is not None
    if by_tool and trust_remote_code and raw.get("architectures") == ["DeciLMForCausalLM"]:
        return None  # vLLM has this architecture, once its authors' config class may run
    if not by_tool and not _may_differ(directory, raw):
        return None
    try:
        model_format, checkpoint = open_to_serve(directory)
    except CheckpointError:
        if by_tool:
            raise
        return None  # --load-format gac refuses it, others do what they do
    if model_format in ("gac", "dense"):
        return None
    logger.info("Serving a model in the format %s as %s", model_format, ARCHITECTURE)
    return dict(checkpoint.raw_config)


def _may_differ(directory: Path, raw: dict[str, Any]) -> bool:
    """Whether tensors of a plain config may say more than it does."""
    quantized = "quantization_config" in raw or (directory / "hf_quant_config.json").exists()
    return raw.get("architectures") in _DENSE and not quantized
