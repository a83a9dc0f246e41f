"""Whether our decode kernel can run a layer on this machine's GPU.

The front-end process calls these functions, so they do not initialize CUDA.
"""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.gpu import decode_fit
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import ModelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def gpu_capability() -> tuple[int, int]:
    """Compute capability of this machine's GPUs; Hopper's if vLLM does not know it."""
    capability = current_platform.get_device_capability()
    return HOPPER if capability is None else (capability.major, capability.minor)


def check_decode_kernel(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError, naming the layer, if its decode kernel does not fit this GPU."""
    if not current_platform.is_cuda():
        return
    queries, itemsizes = _served(vllm_config)
    checked = set()  # many layers have the same heads
    for index, layer in enumerate(layout.layers):
        attention = layer.query_heads, layer.key, layer.value
        if attention in checked:
            continue
        try:
            decode_fit.check_layer(layout, layer, gpu_capability(), queries, itemsizes)
        except GacError as error:
            raise CheckpointError(f"layer {index}: {error}") from None
        checked.add(attention)


def check_dense_heads(vllm_config: "VllmConfig") -> None:
    """The same for the layers of vLLM's own model, which all have the same heads."""
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    kv_heads, size = model_config.get_num_kv_heads(parallel_config), model_config.get_head_size()
    heads = model_config.get_num_attention_heads(parallel_config)
    geometry = CacheGeometry(heads, size, kv_heads, size, kv_heads, size)
    try:
        decode_fit.check_heads(geometry, 0, gpu_capability(), *_served(vllm_config))
    except GacError as error:
        fault = str(error).partition(";")[0]  # what follows is about choosing heads
        raise CheckpointError(f"--attention-backend GAC: {fault}; leave it out") from None


def _served(vllm_config: "VllmConfig") -> tuple[int, tuple[int, ...]]:
    """Query tokens of a decoding request, and bytes of cached numbers for each cache dtype."""
    speculative, cache = vllm_config.speculative_config, vllm_config.cache_config
    queries = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    fp8, mixed = cache.cache_dtype.startswith("fp8"), bool(cache.kv_cache_dtype_skip_layers)
    return queries, (1, 2) if fp8 and mixed else (1,) if fp8 else (2,)
