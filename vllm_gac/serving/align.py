"""Padding dims at load time: decided in the front-end process, before any model is built."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.repair.dims import padded_layout
from vllm_gac.serving.hf_layout import serve_padded, stored_layout
from vllm_gac.serving.loader_options import loader_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def align_config(vllm_config: "VllmConfig") -> None:
    """Pad the layout in `vllm_config` as the loader's option `align` says; minimal by default.

    Tensors that a quantizer packed, and LoRA adapters, which are made for the dims in the files,
    cannot follow: by default they keep theirs, and asking for more raises CheckpointError.
    """
    model_config = vllm_config.model_config
    options = loader_options(vllm_config.load_config.model_loader_extra_config)
    stored = stored_layout(model_config.hf_config)
    tp = vllm_config.parallel_config.tensor_parallel_size
    padded = padded_layout(stored, options.align or "minimal", options.gpu, tp)
    if padded == stored:
        return
    if (what := _made_for_its_dims(vllm_config)) is not None:
        if options.align is not None:
            raise CheckpointError(
                f"--model-loader-extra-config: align {options.align} would pad dims that {what} "
                "made for; leave it out"
            )
        logger.info("Serving misaligned dims as they are, since %s made for them", what)
        return
    serve_padded(model_config.hf_config, padded)
    # vLLM sizes scratch by its head size.
    model_config.model_arch_config = model_config.get_model_arch_config()
    pairs = zip(stored.dims(), padded.dims(), strict=True)
    logger.info(
        "Padding %d dims with zeros: %+.2f %% parameters, %+.2f %% KV cache; "
        '--model-loader-extra-config \'{"align": "none"}\' serves them as they are',
        sum(before != after for before, after in pairs),
        100 * (padded.parameters / stored.parameters - 1),
        100 * (padded.kv_elements / stored.kv_elements - 1),
    )


def _made_for_its_dims(vllm_config: "VllmConfig") -> str | None:
    if getattr(vllm_config.model_config.hf_config, "quantization_config", None) is not None:
        return "quantized tensors are"
    return "LoRA adapters are" if vllm_config.lora_config is not None else None
