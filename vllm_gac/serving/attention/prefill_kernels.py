"""The prefill kernels of select.py, called alike: causal attention of sequences of any lengths."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from vllm.platforms import current_platform

from vllm_gac.gpu.attention_choice import PREFILL_KERNELS, Gpu, Sizes, widths
from vllm_gac.layout.rounding import ceil_div

# FlashAttention 4 compiles another kernel for fewer queries than fill a tile; this many do.
_FULL_TILE = 256
_BOTTOM_RIGHT = 2  # PyTorch's and xformers' number for a causal mask aligned at the last tokens
# FlashAttention 3 splits contexts as often as the multiprocessors of a Hopper GPU that one sequence
# would leave idle, in tiles of so many queries, and holds a result in fp32 for each part of every
# sequence: up to gigabytes for many short ones. So much is left to it.
_MULTIPROCESSORS, _QUERY_TILE, _SPLIT_BYTES = 132, 192, 128 << 20


@dataclass(frozen=True, slots=True)
class Context:
    """Where each sequence's keys begin: at `starts` one after the other, or in pages.

    starts int32 [sequences + 1]; or lengths int32 [sequences] and block_table int32 [sequences,
    blocks]. The other is None.
    """

    longest: int
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


def installed_gpu() -> Gpu:
    """This machine's GPU, and what is installed for it; never initializes CUDA."""
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None:
        return Gpu((0, 0), ())
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    def is_installed(kernel: str) -> bool:
        if kernel == "FA4" and find_spec("cutlass") is None:  # which compiles it, when it is run
            return False
        return kernel == "xformers" or is_fa_version_supported(int(kernel.removeprefix("FA")))

    installed = tuple(filter(is_installed, PREFILL_KERNELS))
    return Gpu((capability.major, capability.minor), installed)


def in_place_kernel(kernel: str, sizes: Sizes, gpu: Gpu) -> str | None:
    """FlashAttention 3 where it reads pages for heads of `sizes` and `kernel` is another one."""
    if kernel == "FA3" or "FA3" not in gpu.installed:
        return None
    at = widths("FA3", sizes, gpu.capability)
    return "FA3" if at is not None and reads_pages("FA3", max(at), 1) else None


def reads_pages(kernel: str, size: int, block_size: int) -> bool:
    """Whether `kernel` reads pages of so many tokens about as fast as one stretch of memory.

    `size` is the larger of the head sizes: from pages FA3 does not load larger ones as fast.
    """
    if kernel == "FA4":
        return block_size % 128 == 0
    return kernel == "FA2" or (kernel == "FA3" and size <= 128)


def attend(
    kernel: str,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    longest_query: int,
    context: Context,
    scale: float,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Attention of each sequence's last tokens over its context, itself included.

    query [tokens, query heads, key size], query_starts int32 [sequences + 1] from 0; keys [context
    tokens, KV heads, key size], or [blocks, block_size, KV heads, key size], and values likewise.
    Writes output [tokens, query heads, value size]. `window` counts the tokens that a query sees.
    """
    if kernel == "xformers":
        _memory_efficient(
            query, keys, values, query_starts, longest_query, context, scale, window, output
        )
        return
    # Not at the top: vLLM has the name on GPUs only.
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    version = int(kernel.removeprefix("FA"))
    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=query_starts,
        max_seqlen_q=max(longest_query, _FULL_TILE) if version == 4 else longest_query,
        cu_seqlens_k=context.starts,
        seqused_k=context.lengths,
        max_seqlen_k=context.longest,
        block_table=context.block_table,
        softmax_scale=scale,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        num_splits={3: fa3_splits(query, values, longest_query), 4: 1}.get(version, 0),
        fa_version=version,
    )


def fa3_splits(query: torch.Tensor, values: torch.Tensor, longest_query: int) -> int:
    """Into how many parts FlashAttention 3 may split contexts; 0 leaves that to itself."""
    tokens, heads = query.shape[:2]
    kv_heads, value_size = values.shape[-2:]
    part = _part_bytes(tokens, heads, value_size)
    tiles = kv_heads * ceil_div(longest_query * (heads // kv_heads), _QUERY_TILE)
    by_itself = ceil_div(_MULTIPROCESSORS, tiles)
    return 0 if by_itself * part <= _SPLIT_BYTES else max(1, _SPLIT_BYTES // part)


def kernel_bytes(
    kernel: str, tokens: int, heads: int, kv_heads: int, value_size: int, dtype: torch.dtype
) -> int:
    """What `attend` holds at most beside its arguments, for so many query tokens."""
    log_sums = 4 * tokens * heads
    if kernel == "FA3":
        part = _part_bytes(tokens, heads, value_size)
        return log_sums + min(_SPLIT_BYTES, _MULTIPROCESSORS * part)
    if kernel == "xformers":
        return log_sums + tokens * kv_heads * value_size * dtype.itemsize
    return log_sums


def _part_bytes(tokens: int, heads: int, value_size: int) -> int:
    return 4 * tokens * heads * (value_size + 1)


def _memory_efficient(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    longest_query: int,
    context: Context,
    scale: float,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """xformers' CUTLASS kernel, which is PyTorch's operator.

    It takes as many key as query heads: one launch for the first query head of every key head, one
    for the second, and so on.
    """
    group = query.shape[1] // keys.shape[1]
    for member in range(group):
        # Without a name, so that it is freed before the next one is made.
        output[:, member::group] = torch.ops.aten._efficient_attention_forward(
            query[None, :, member::group],
            keys[None],
            values[None],
            None,
            query_starts,
            context.starts,
            longest_query,
            context.longest,
            0.0,
            _BOTTOM_RIGHT,
            scale=scale,
            window_size=window,
        )[0][0]
