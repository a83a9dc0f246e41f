"""The config parser of gac models.

vLLM hands every config in Hugging Face's format to one parser, before it knows the model. Ours runs
first. The config that it returns travels to every process.
"""

from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig
from vllm.transformers_utils.config import HFConfigParser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.layout.families import FAMILIES
from vllm_gac.serving.config.foreign_code import mentions_gac, refuse_foreign_code
from vllm_gac.serving.gac_config import GacConfig


class GacConfigParser(ConfigParserBase):
    """Parses as the parser `before`; the config of a gac model becomes a `GacConfig`."""

    before: ClassVar[type[ConfigParserBase]] = HFConfigParser

    def parse(
        self, model: str | Path, trust_remote_code: bool, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        """config.json as a dict, and as transformers' config.

        Raises CheckpointError for a gac model whose config.json is not well-formed, or that a class
        other than ours would serve.
        """
        if mentions_gac(path := Path(model) / "config.json"):
            read_json(path)
        raw, config = self.before().parse(model, trust_remote_code, *args, **kwargs)
        refuse_foreign_code(model, raw, raw.get("architectures"), kwargs.get("hf_overrides"))
        if "gac" in raw and config.model_type in FAMILIES:
            config = GacConfig.adopt(config)
        else:
            _scale_queries(getattr(config, "text_config", config))
        return raw, config


def _scale_queries(config: PreTrainedConfig) -> None:
    """Tell vLLM's own Ministral 3 how queries are scaled: it reads its own spelling only."""
    family = FAMILIES.get(str(getattr(config, "model_type", None)))
    rope = getattr(config, "rope_parameters", None) or {}
    beta, context = map(rope.get, ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if family and family.scales_queries and beta and not hasattr(config, "llama_4_scaling"):
        config.llama_4_scaling = {"beta": beta, "original_max_position_embeddings": context}
