"""One call for every prefill kernel of gpu/attention_choice.py.

Each computes causal attention of sequences of any lengths.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from vllm.platforms import current_platform

from vllm_gac.gpu.attention_choice import PREFILL_KERNELS, Gpu, Sizes, widths
from vllm_gac.kernels.gpu_limits import MULTIPROCESSORS
from vllm_gac.layout.rounding import ceil_div

# FlashAttention 4 compiles another kernel if the longest query does not fill a tile. It is told at
# least this many tokens, which do.
_FULL_TILE = 256
_BOTTOM_RIGHT = 2  # PyTorch's and xformers' number for a causal mask aligned at the last tokens
# FlashAttention 3 splits contexts into parts, so that one sequence fills all multiprocessors of a
# Hopper GPU. It holds an fp32 result for each part of every sequence, which is gigabytes for many
# short sequences. It may split as it likes up to this many bytes.
_SPLIT_BYTES = 128 << 20
_QUERY_TILE = 192  # query tokens x heads in a tile


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Where the keys and values of each sequence lie: one after the other, or in pages.

    One after the other: `starts` is int32 [sequences + 1], the rest is None. In pages: `lengths` is
    int32 [sequences], `block_table` is int32 [sequences, blocks], and `starts` is None. `longest`
    is the longest context, in tokens.
    """

    longest: int
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


def installed_gpu() -> Gpu:
    """This machine's GPU and the prefill kernels installed for it. Does not initialize CUDA."""
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None:
        return Gpu((0, 0), ())
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    def is_installed(kernel: str) -> bool:
        if kernel == "FA4" and find_spec("cutlass") is None:  # compiles FA4 when it runs
            return False
        return kernel == "xformers" or is_fa_version_supported(int(kernel.removeprefix("FA")))

    installed = tuple(filter(is_installed, PREFILL_KERNELS))
    return Gpu((capability.major, capability.minor), installed)


def in_place_kernel(kernel: str, sizes: Sizes, gpu: Gpu) -> str | None:
    """FA3 if it reads pages for heads of `sizes` and is not `kernel` itself; else None."""
    if kernel == "FA3" or "FA3" not in gpu.installed:
        return None
    kernel_sizes = widths("FA3", sizes, gpu.capability)
    if kernel_sizes is None or not reads_pages("FA3", max(kernel_sizes), 1):
        return None
    return "FA3"


def reads_pages(kernel: str, size: int, block_size: int) -> bool:
    """Whether `kernel` reads pages of `block_size` tokens about as fast as contiguous memory.

    `size` is the larger of the head sizes: FA3 loads heads above 128 from pages more slowly.
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
    max_seqlen_q: int,
    context: ContextLayout,
    scale: float,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Causal attention of each sequence's last tokens over its context.

    The context includes those tokens themselves.

    Args:
        kernel: One of `gpu.attention_choice.PREFILL_KERNELS`.
        query: [tokens, query heads, key size].
        keys: [context tokens, KV heads, key size], or [blocks, block_size, KV heads, key size] if
            `context` is in pages.
        values: As `keys`, with the value size.
        query_starts: Cumulative numbers of query tokens, int32 [sequences + 1]; the first is 0.
        max_seqlen_q: Most query tokens of a sequence.
        context: Where the keys and values of each sequence lie.
        scale: The softmax scale.
        window: Tokens that a query sees, itself included; None for all.
        output: [tokens, query heads, value size]; is overwritten.
    """
    if kernel == "xformers":
        # CUTLASS's kernel, which PyTorch ships as an operator. It takes as many key heads as query
        # heads, so it runs once for the first query head of every key head, and so on.
        group = query.shape[1] // keys.shape[1]
        for member in range(group):
            # The result has no name, so that it is freed before the next launch allocates its own.
            output[:, member::group] = torch.ops.aten._efficient_attention_forward(
                query[None, :, member::group],
                keys[None],
                values[None],
                None,
                query_starts,
                context.starts,
                max_seqlen_q,
                context.longest,
                0.0,
                _BOTTOM_RIGHT,
                scale=scale,
                window_size=window,
            )[0][0]
        return
    # Not at the top: vLLM defines the name on GPUs only.
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    version = int(kernel.removeprefix("FA"))
    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=query_starts,
        max_seqlen_q=max(max_seqlen_q, _FULL_TILE) if version == 4 else max_seqlen_q,
        cu_seqlens_k=context.starts,
        seqused_k=context.lengths,
        max_seqlen_k=context.longest,
        block_table=context.block_table,
        softmax_scale=scale,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        num_splits={3: fa3_splits(query, values, max_seqlen_q), 4: 1}.get(version, 0),
        fa_version=version,
    )


def fa3_splits(query: torch.Tensor, values: torch.Tensor, max_seqlen_q: int) -> int:
    """The most parts into which FlashAttention 3 may split a context; 0 leaves it the choice."""
    tokens, heads = query.shape[:2]
    kv_heads, value_size = values.shape[-2:]
    part_bytes = _part_bytes(tokens, heads, value_size)
    tiles = kv_heads * ceil_div(max_seqlen_q * (heads // kv_heads), _QUERY_TILE)
    parts_by_default = ceil_div(MULTIPROCESSORS, tiles)
    if parts_by_default * part_bytes <= _SPLIT_BYTES:
        return 0
    return max(1, _SPLIT_BYTES // part_bytes)


def kernel_bytes(
    kernel: str, tokens: int, heads: int, kv_heads: int, value_size: int, dtype: torch.dtype
) -> int:
    """Most bytes that `attend` allocates beside its arguments, for `tokens` query tokens."""
    log_sums = 4 * tokens * heads
    if kernel == "FA3":
        part_bytes = _part_bytes(tokens, heads, value_size)
        return log_sums + min(_SPLIT_BYTES, MULTIPROCESSORS * part_bytes)
    if kernel == "xformers":
        return log_sums + tokens * kv_heads * value_size * dtype.itemsize
    return log_sums


def _part_bytes(tokens: int, heads: int, value_size: int) -> int:
    """Bytes of one part's result and log-sums, in fp32."""
    return 4 * tokens * heads * (value_size + 1)
