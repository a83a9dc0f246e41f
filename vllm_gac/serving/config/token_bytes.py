"""The bytes of KV cache that one token takes."""

from typing import TYPE_CHECKING

from vllm_gac.layout.dims import ModelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def kv_token_bytes(layout: ModelLayout, vllm_config: "VllmConfig") -> int:
    """Bytes of KV cache that one token takes in all layers of `layout`.

    vLLM leaves the layers of --kv-cache-dtype-skip-layers in the model's dtype: those whose index
    is listed, and with "sliding_window" all that have a window.
    """
    cache, model_dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    skipped = set(cache.kv_cache_dtype_skip_layers)
    if "sliding_window" in skipped and cache.sliding_window is not None:
        skipped |= set(map(str, range(len(layout.layers))))
    model_bytes = model_dtype.itemsize
    cached = {"auto": model_bytes, "float16": 2, "bfloat16": 2}.get(cache.cache_dtype, 1)
    return sum(
        layer.kv_elements * (model_bytes if str(index) in skipped else cached)
        for index, layer in enumerate(layout.layers)
    )
