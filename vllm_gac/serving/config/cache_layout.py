"""How the pages of a gac model's cache lie in memory on a GPU: head by head (HND), not token by
token (NHD).

Of a page, a decode kernel reads one head: its tokens then follow each other, whatever a row's
bytes. Token by token a row lies between those of other heads, and memory is read 64 bytes at a
time: rows that are no multiple of that take up to 14 % longer where much is read
(benchmarks/results/cache_layout_h200.md).
"""

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def choose_cache_layout(vllm_config: "VllmConfig") -> None:
    """Have heads come first, unless something else has a say in it.

    Decided here, not as a preference of our backend, which takes any: vLLM wants all pipeline
    stages to prefer the same, and one may have no layer of ours. What is decided here vLLM does not
    check again, so it is left alone where a backend might not take it.
    """
    attention = vllm_config.attention_config
    decided = (
        envs.VLLM_KV_CACHE_LAYOUT,
        # A connector prefers one, and peers must share it; the size makes one, later.
        vllm_config.kv_transfer_config,
        vllm_config.cache_config.kv_offloading_size,
        attention.backend,
        attention.backend_per_kind or None,
        vllm_config.speculative_config,  # may bring a model with a backend of its own
        vllm_config.cache_config.kv_cache_layout,
    )
    if current_platform.is_cuda() and all(choice is None for choice in decided):
        layout = KVCacheLayout.LBHNC.name
        vllm_config.cache_config.kv_cache_layout = layout
        logger.info("Using %s KV cache layout; set VLLM_KV_CACHE_LAYOUT for another", layout)


def zero_pages(
    layout: KVCacheLayout,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A cache of one layer, [blocks, heads, tokens, row], that lies in memory as `layout` says."""
    order = layout.layer_view_order
    held = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=device)
    return held.permute([order.index(axis) for axis in range(len(order))])
