"""The memory layout of KV cache pages on a GPU: head by head (HND), not token by token (NHD).

A program of the decode kernel reads one head of a page. With HND the rows of that head are
contiguous. With NHD each row lies between rows of other heads. GPUs read memory in pieces of 64
bytes, so NHD rows that are not a multiple of 64 bytes make long reads up to 14 % slower
(docs/decisions.md).
"""

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.engine_options import gac_backend_requested

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# The layouts that our backend serves: in all of them a page's bytes are in one place. With others
# no prefill kernel was tried.
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
_ALIASES = {"HND": KVCacheLayout.LBHNC.name, "NHD": KVCacheLayout.LBNHC.name}


def choose_cache_layout(vllm_config: "VllmConfig") -> None:
    """Choose HND, unless the user or another component decides the layout.

    Our backend does not state its layouts by vLLM's interface, because vLLM wants all pipeline
    stages to state the same ones, and a stage may have no layer of our backend. vLLM does not check
    a layout that is set here. So none is set where a backend might not take it. Raises
    CheckpointError if the user asks for a layout that is not one of LAYOUTS.
    """
    requested, names = envs.VLLM_KV_CACHE_LAYOUT, [layout.name for layout in LAYOUTS]
    on_gpu = current_platform.is_cuda()
    if on_gpu and requested is not None and _ALIASES.get(requested, requested) not in names:
        raise CheckpointError(
            f"VLLM_KV_CACHE_LAYOUT: is {requested}, which keeps the heads of a page apart; on a "
            f"GPU GAC takes {', '.join(names)}; unset it, or choose one of these"
        )
    attention = vllm_config.attention_config
    decided = (
        requested,
        # A connector prefers a layout that its peers share. An offloading size makes vLLM add a
        # connector later.
        vllm_config.kv_transfer_config,
        vllm_config.cache_config.kv_offloading_size,
        None if gac_backend_requested(vllm_config) else attention.backend,
        attention.backend_per_kind or None,
        vllm_config.speculative_config,  # a drafter's backend may not take it
        vllm_config.cache_config.kv_cache_layout,
    )
    if on_gpu and all(choice is None for choice in decided):
        layout = KVCacheLayout.LBHNC.name
        vllm_config.cache_config.kv_cache_layout = layout
        logger.info("Using %s KV cache layout; set VLLM_KV_CACHE_LAYOUT for another", layout)


def zero_pages(
    layout: KVCacheLayout,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A cache of zeros for one layer, [blocks, heads, tokens in a page, row] as in `shape`.

    It is a view of memory in the order of `layout`.
    """
    order = layout.layer_view_order
    in_memory = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=device)
    return in_memory.permute([order.index(axis) for axis in range(len(order))])
