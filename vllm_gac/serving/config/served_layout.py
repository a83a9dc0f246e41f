"""Decides in the front-end process which layout is served: padded, split over GPUs.

Quantization needs multiples of dims, and a type of the cache. Both are known before tensors are
padded: vLLM quantizes a linear after all of it is loaded.
"""

import math
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.alignment.rules import (
    FP8_CACHE_MULTIPLE,
    LINEAR_MULTIPLES,
    QuantizationMultiples,
    padded_layout,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.tensor_parallel import check_split, repeated_heads
from vllm_gac.serving.gac_config import GacConfig, set_served_layout
from vllm_gac.serving.loading.options import loader_options
from vllm_gac.serving.loading.quantized_checkpoint import quantization_section
from vllm_gac.serving.vllm_internals import online_quantizations

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def align_config(vllm_config: "VllmConfig") -> None:
    """Pad the layout in `vllm_config` as the loader's option `align` says; the default is minimal.

    Quantization while loading may need larger multiples; dims are padded for it as well. Tensors
    that a quantizer has packed cannot be padded. They keep their dims by default.

    Raises CheckpointError if `align` is given for a model whose tensors are packed, or a trainer is
    to send weights, which do not pass through our loader; and ProfileError if there is no profile
    of the option `gpu`.
    """
    model_config = vllm_config.model_config
    options = loader_options(vllm_config.load_config.model_loader_extra_config)
    if options.gpu is not None:
        read_profile(options.gpu)  # `align` may need none, but a mistake is told here
    stored = GacConfig.of(model_config.hf_config).stored
    tp = vllm_config.parallel_config.tensor_parallel_size
    quantized = requested_quantization(vllm_config)
    padded = padded_layout(stored, options.align or "minimal", options.gpu, tp, quantized)
    if padded == stored:
        return
    if quantization_section(model_config.hf_config) is not None:
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


def shard_config(vllm_config: "VllmConfig") -> None:
    """Check that the layout can be split as the parallel config says.

    If a layer has fewer key or value heads than there are tensor-parallel ranks, write a layout
    into the config in which heads are repeated, so that each rank has one. Raises CheckpointError
    if a layer cannot be split, or its heads would have to be repeated and cannot be, because they
    are quantized, or because LoRA adapters or the weights that a trainer sends are made for them.
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
    if quantization_section(model_config.hf_config) is not None:
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


def requested_quantization(vllm_config: "VllmConfig") -> QuantizationMultiples:
    """The multiples that `--quantization`, `--quantization-config` and `--kv-cache-dtype` need."""
    multiples = (LINEAR_MULTIPLES.get(name, 1) for name in quantizations(vllm_config.model_config))
    fp8_cache = vllm_config.cache_config.cache_dtype.startswith("fp8")
    return QuantizationMultiples(math.lcm(*multiples), FP8_CACHE_MULTIPLE if fp8_cache else 1)


def resolve_cache_dtype(vllm_config: "VllmConfig") -> None:
    """Set the cache dtype that config.json's `kv_cache_scheme` asks for, unless the user has.

    vLLM does so when it builds the first attention layer, after kernels and sizes are chosen.
    """
    packed = quantization_section(vllm_config.model_config.hf_config) or {}
    cache = vllm_config.cache_config
    is_scaled = packed.get("quant_method") == "compressed-tensors" and packed.get("kv_cache_scheme")
    if is_scaled and cache.cache_dtype == "auto":
        cache.cache_dtype = "fp8"


def quantizations(model_config: "ModelConfig") -> set[str]:
    """vLLM's names of all quantizations that are applied to linear layers while loading."""
    names = {model_config.quantization or ""}
    if names == {"fp8"} and quantization_section(model_config.hf_config) is None:
        names = {"fp8_per_tensor"}  # vLLM's old name of it
    requested = model_config.quantization_config
    if requested is None or isinstance(requested, dict):
        return names
    names |= set((requested.targets or {}).values())
    for name, shorthand in online_quantizations().items():
        if not (requested.linear and shorthand.linear):
            continue
        if requested.linear.weight == shorthand.linear.weight:
            names.add(name)
    return names
