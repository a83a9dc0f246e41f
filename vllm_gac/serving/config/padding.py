"""Decides how dims are padded at load time, in the front-end process."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.merging import merged_layout
from vllm_gac.serving.config.quantization import requested_quantization
from vllm_gac.serving.gac_config import GacConfig, set_served_layout
from vllm_gac.serving.loading.options import loader_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def align_config(vllm_config: "VllmConfig") -> None:
    """Pad the layout in `vllm_config` as the loader's option `align` says; the default is minimal.

    With the option `merge_factors` the factors of low-rank linears are multiplied first.
    Quantization while loading may need larger multiples; dims are padded for it as well.
    Tensors that a quantizer has packed cannot be padded. They keep their dims by default.

    Raises:
        CheckpointError: `align` is given for a model whose tensors are packed, or a trainer is to
            send weights, which do not pass through our loader; or factors cannot be multiplied.
    """
    model_config = vllm_config.model_config
    options = loader_options(vllm_config.load_config.model_loader_extra_config)
    stored = GacConfig.of(model_config.hf_config).stored
    if options.merge_factors:
        stored = merged_layout(vllm_config, stored)
        set_served_layout(model_config, stored)
    tp = vllm_config.parallel_config.tensor_parallel_size
    quantized = requested_quantization(vllm_config)
    padded = padded_layout(stored, options.align or "minimal", options.gpu, tp, quantized)
    if padded == stored:
        return
    if getattr(model_config.hf_config, "quantization_config", None) is not None:
        if options.align is not None:
            raise CheckpointError(
                f"--model-loader-extra-config: align {options.align} would pad dims that quantized "
                "tensors are made for; leave it out, or run 'vllm-gac repair' on the model before "
                "it is quantized"
            )
        logger.info("Serving misaligned dims as they are: quantized tensors cannot be padded")
        return
    if vllm_config.weight_transfer_config is not None:
        raise CheckpointError(
            "--weight-transfer-config: dims of this model are padded at load time, and weights "
            "that a trainer sends would not fit; serve what 'vllm-gac repair' makes of it, or give "
            '--model-loader-extra-config \'{"align": "none"}\''
        )
    set_served_layout(model_config, padded)
    pairs = zip(stored.dims(), padded.dims(), strict=True)
    logger.info(
        "Padding %d dims with zeros: %+.2f %% parameters, %+.2f %% KV cache; "
        '--model-loader-extra-config \'{"align": "none"}\' serves them as they are',
        sum(before != after for before, after in pairs),
        100 * (padded.parameters / stored.parameters - 1),
        100 * (padded.kv_elements / stored.kv_elements - 1),
    )
