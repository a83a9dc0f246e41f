"""Decides in the front-end process which layout is served: merged, padded, split over GPUs.

In FP8 two factors take longer than the linear that they replace (docs/decisions.md). A model that
was planned for 16 bits may have them all the same. Multiplied, they take the time of that linear,
and its memory, which the KV cache lacks.
"""

import re
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.alignment.rules import padded_layout
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.tensor_parallel import check_split, repeated_heads
from vllm_gac.serving.config.cache_layout import kv_token_bytes
from vllm_gac.serving.config.quantization import quantizations, requested_quantization
from vllm_gac.serving.gac_config import GacConfig, set_served_layout
from vllm_gac.serving.loading.merged_factors import check_has_factors
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
    if _is_packed(vllm_config):
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


def merged_layout(vllm_config: "VllmConfig", stored: ModelLayout) -> ModelLayout:
    """`stored` with the factors of each low-rank linear multiplied out; a log line says the price.

    Raises:
        CheckpointError: No linear is low rank, or the factors have to stay apart.
    """
    check_has_factors(stored)
    if (reason := unmergeable(vllm_config)) is not None:
        raise CheckpointError(
            f"--model-loader-extra-config: merge_factors: cannot multiply factors out, because "
            f"{reason}; leave it out"
        )
    merged = stored.without_ranks()
    names = quantizations(vllm_config.model_config)
    bits_by_name = [int(bits) for name in names for bits in re.findall(r"(?:fp|int)(\d+)", name)]
    bits = min(bits_by_name, default=8 * vllm_config.model_config.dtype.itemsize)
    more = (merged.parameters - stored.parameters) * bits / 8
    logger.info(
        "Multiplying out the factors of %d low-rank linears: %+.2f %% parameters, about %+.2f "
        "GB of weights, so %s tokens in the KV cache",
        stored.low_rank_linears,
        100 * (merged.parameters / stored.parameters - 1),
        more / 1e9,
        f"{-more / kv_token_bytes(stored, vllm_config):+,.0f}",
    )
    return merged


def unmergeable(vllm_config: "VllmConfig") -> str | None:
    """Why the factors of low-rank linears have to stay apart; None if they can be multiplied."""
    if _is_packed(vllm_config):
        return "they are quantized already"
    if vllm_config.weight_transfer_config is not None:
        return "a trainer (--weight-transfer-config) sends them apart"
    if vllm_config.lora_config is not None:
        return "LoRA adapters (--enable-lora) of this model adapt each by itself"
    return None


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
    reason = None
    if _is_packed(vllm_config):
        reason = "quantized tensors cannot be"
    elif vllm_config.weight_transfer_config is not None:
        reason = "weights that a trainer sends would not fit"
    elif vllm_config.lora_config is not None:
        reason = "LoRA adapters would not fit"
    if reason is not None:
        raise CheckpointError(
            f"--tensor-parallel-size {tp}: layer {first} has {heads} heads to share, which would "
            f"have to be repeated, but {reason}; use at most {heads}"
        )
    logger.info("Repeating key and value heads, so that each of %d ranks has one", tp)
    set_served_layout(model_config, served)


def _is_packed(vllm_config: "VllmConfig") -> bool:
    return getattr(vllm_config.model_config.hf_config, "quantization_config", None) is not None
