"""The config hook: checks and completes a gac model's VllmConfig before any worker starts."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import LOAD_FORMAT
from vllm_gac.serving.config.cache_layout import choose_cache_layout
from vllm_gac.serving.config.cuda_graphs import choose_cuda_graphs
from vllm_gac.serving.config.engine_options import (
    check_decode_kernel,
    check_engine_options,
    check_experts,
    check_lora_targets,
    check_role,
)
from vllm_gac.serving.config.kv_transfer import check_kv_transfer
from vllm_gac.serving.config.overrides import resolve_overrides
from vllm_gac.serving.config.pipeline_stages import choose_stages
from vllm_gac.serving.config.served_layout import align_config, resolve_cache_dtype, shard_config
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.options import loader_options
from vllm_gac.serving.loading.preflight import preflight
from vllm_gac.serving.loading.quantized_checkpoint import check_cache_scheme
from vllm_gac.serving.registration import refuse_if_unregistered

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# Load formats that read the same files as ours, so ours may replace them.
_PLAIN_FORMATS = ("auto", "hf", "safetensors")


class GacConfigHook:
    """Hook of GacLlamaForCausalLM in vLLM's MODELS_CONFIG_MAP.

    It has the methods of vLLM's VerifyAndUpdateConfig but does not import that class: the import of
    vLLM's module is what triggers the import of this one (`vllm_gac.serving.plugin`).
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Parse the layout, so that a faulty config.json fails before anything starts."""
        refuse_if_unregistered()
        check_role(model_config)
        config = GacConfig.of(model_config.hf_config)
        resolve_overrides(config)
        check_cache_scheme(config)
        _choose_tokenizer(model_config, config)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Choose our loader, pad and split dims, and check the engine options.

        The tensor headers of a local directory are checked here, before a GPU is touched.
        """
        model_config, load_config = vllm_config.model_config, vllm_config.load_config
        _choose_load_format(load_config)
        resolve_cache_dtype(vllm_config)
        config = GacConfig.of(model_config.hf_config)
        check_experts(vllm_config, config.stored)
        check_lora_targets(vllm_config, config.stored)
        _preflight(Path(model_config.model), config, load_config)
        align_config(vllm_config)
        shard_config(vllm_config)
        choose_stages(vllm_config)
        layout = config.served
        check_kv_transfer(vllm_config, layout)
        check_engine_options(vllm_config)
        check_decode_kernel(vllm_config, layout)
        choose_cache_layout(vllm_config)
        choose_cuda_graphs(vllm_config)


def _choose_tokenizer(model_config: "ModelConfig", config: GacConfig) -> None:
    """Make tokens as vLLM makes those of the dense model, which had Mistral's own files."""
    gac = config.checked.gac
    if gac is None or gac.source.get("tokenizer_mode") != "mistral":
        return
    if model_config.tokenizer == model_config.model and model_config.tokenizer_mode == "auto":
        model_config.tokenizer_mode = "mistral"


def _choose_load_format(load_config: "LoadConfig") -> None:
    """Choose our loader. Raises CheckpointError for another one, or for options that ours lacks."""
    requested, extra = load_config.load_format, load_config.model_loader_extra_config
    if requested not in (LOAD_FORMAT, "dummy", *_PLAIN_FORMATS):
        raise CheckpointError(
            f"--load-format {requested}: would load a gac model's tensors unchecked; leave it out, "
            f"or give {LOAD_FORMAT}, which reads *.safetensors from a directory on disk"
        )
    loader_options(extra)
    if requested == LOAD_FORMAT:
        return
    if requested == "dummy":
        load_config.model_loader_extra_config = {**extra, "weights": "dummy"}
    logger.info("Loading a gac model with --load-format %s", LOAD_FORMAT)
    load_config.load_format = LOAD_FORMAT


def _preflight(directory: Path, config: GacConfig, load_config: "LoadConfig") -> None:
    """Check the tensor headers of a local directory, unless weights are dummies."""
    dummy = load_config.model_loader_extra_config.get("weights") == "dummy"
    if directory.is_dir() and not dummy:
        preflight(directory, config)
