"""Checks how a layout is split over GPUs, in the front-end process."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.tensor_parallel import check_split, repeated_heads
from vllm_gac.serving.gac_config import GacConfig, set_served_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def shard_config(vllm_config: "VllmConfig") -> None:
    """Check that the layout can be split as the parallel config says.

    If a layer has fewer key or value heads than there are tensor-parallel ranks, write a layout
    into the config in which heads are repeated, so that each rank has one.

    Raises:
        CheckpointError: A layer cannot be split, or its heads would have to be repeated and cannot
            be, because they are quantized, or because LoRA adapters or the weights that a trainer
            sends are made for them.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    layout = GacConfig.of(model_config.hf_config).served
    tp = parallel.tensor_parallel_size
    check_split(layout, tp, parallel.pipeline_parallel_size)
    served = repeated_heads(layout, tp)
    if served.layers == layout.layers:
        return
    pairs = zip(layout.layers, served.layers, strict=True)
    first = next(index for index, (before, after) in enumerate(pairs) if before != after)
    heads = min(layout.layers[first].key.heads, layout.layers[first].value.heads)
    if (reason := _unrepeatable(vllm_config)) is not None:
        raise CheckpointError(
            f"--tensor-parallel-size {tp}: layer {first} has {heads} heads to share, which would "
            f"have to be repeated, but {reason}; use at most {heads}"
        )
    logger.info("Repeating key and value heads, so that each of %d ranks has one", tp)
    set_served_layout(model_config, served)


def _unrepeatable(vllm_config: "VllmConfig") -> str | None:
    """Why heads cannot be repeated; None if they can."""
    if getattr(vllm_config.model_config.hf_config, "quantization_config", None) is not None:
        return "quantized tensors cannot be"
    if vllm_config.weight_transfer_config is not None:
        return "weights that a trainer sends would not fit"
    return "LoRA adapters would not fit" if vllm_config.lora_config is not None else None
