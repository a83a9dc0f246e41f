"""How the pages of a gac model's cache lie in memory on a GPU: head by head, not token by token.

Of a page, a decode kernel reads one head: its tokens then follow each other, whatever a row's
bytes. Token by token a row lies between those of other heads, and memory is read 64 bytes at a
time: rows that are no multiple of that take up to 14 % longer in large batches
(benchmarks/results/cache_layout_h200.md).
"""

from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def choose_cache_layout(vllm_config: "VllmConfig") -> None:
    """Have heads come first, unless something else has a say in it.

    Decided here, not as a preference of our backend: vLLM wants all pipeline stages to prefer the
    same, and one may have no layer of ours.
    """
    decided = (
        envs.VLLM_KV_CACHE_LAYOUT,
        vllm_config.kv_transfer_config,  # its connector prefers one, and peers must share it
        vllm_config.attention_config.backend,  # may not take all of them
        vllm_config.cache_config.kv_cache_layout,
    )
    if current_platform.is_cuda() and all(choice is None for choice in decided):
        vllm_config.cache_config.kv_cache_layout = KVCacheLayout.LBHNC.name
