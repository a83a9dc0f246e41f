"""Prefill: the context of each sequence, as the layer's kernel wants it, and the kernel on it.

A step's own keys and values serve as they are where they are the whole context; else kernels that
read pages get the packed cache itself; else rows are gathered once per chunk (kernels/context.py),
of as many sequences at once as prefill_memory.py allows. For a few tokens after a long past a
kernel that reads pages is taken where there is one, even if it pads heads: gathering would cost
more.

A kernel that takes only equal sizes gets views of the larger one over the packed rows: keys from
the front of a row, values up to its end. Queries are then padded with zeros, or what the surplus
columns of the values add in front of the result is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import widths
from vllm_gac.kernels.copy_columns import copy_columns
from vllm_gac.kernels.gather_context import Source, gather_rows
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention.prefill_kernels import Context, attend, reads_pages

# Query heads x new tokens that meet each gathered key: with fewer, gathering costs more than what
# FlashAttention 3 pads. In benchmarks/results/prefill_h200 both cost the same at 1300 to 2500.
_FEW_QUERIES = 1024


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The prefilling sequences of one step.

    query_starts and context_starts int32 [sequences + 1] are cumulative lengths, lengths int32
    [sequences] those of the contexts, new tokens included; block_table int32 [sequences, blocks].
    If rows must be gathered and are too many, the batch is met in `parts`: beside each the rows of
    its tokens.
    """

    query_starts: torch.Tensor
    context_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    longest_query: int
    longest_context: int
    context_tokens: int
    has_past: bool  # whether any sequence had tokens cached before
    queries_per_key: float  # new tokens that meet a token of the context, on average over those
    parts: tuple[tuple[slice, "PrefillBatch"], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """What prefill needs to know of a layer.

    `kernel` is one of select.PREFILL_KERNELS; `in_place`, if any, another one that reads pages.
    """

    geometry: CacheGeometry
    kernel: str
    capability: tuple[int, int]
    scale: float
    window: int | None = None
    latent: LatentKeys | None = None
    in_place: str | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Of keys and values as kernels meet them, the smallest that they take."""
        return self.geometry.head_sizes

    @property
    def is_plain(self) -> bool:
        """Whether a kernel could take cached rows as they are."""
        g = self.geometry
        aligned = (g.key_size, g.value_size) == self.sizes
        return self.latent is None and g.key_heads == g.value_heads and aligned

    def reads(self, kernel: str, block_size: int, quantized: bool) -> bool:
        """Whether `kernel` meets the cached rows in their pages, of so many tokens each."""
        at = widths(kernel, self.sizes, self.capability)
        if at is None or quantized or not self.is_plain:
            return False
        return reads_pages(kernel, max(at), block_size)


def prefill_batch(
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    most_gathered: int = 0,
) -> PrefillBatch:
    """Describe sequences by host tensors query_starts [n + 1] (from 0) and context_lengths [n].

    lengths, which are the context lengths, and block_table [n, blocks] are on the device. At most
    `most_gathered` tokens of context are to be gathered at once, unless it is 0, or one sequence
    that is longer.
    """
    query_lengths = query_starts[1:] - query_starts[:-1]
    context_starts = pad(context_lengths.cumsum(0), (1, 0))
    starts = torch.stack([query_starts, context_starts]).int()
    on_device = starts.to(lengths.device, non_blocking=True)  # one copy for both
    tokens = int(context_starts[-1])
    parts: tuple[tuple[slice, PrefillBatch], ...] = ()
    if most_gathered and tokens > most_gathered and len(context_lengths) > 1:
        runs = runs_within(context_lengths.tolist(), most_gathered)
        parts = prefill_batches(query_starts, context_lengths, lengths, block_table, runs)
    return PrefillBatch(
        query_starts=on_device[0],
        context_starts=on_device[1],
        lengths=lengths,
        block_table=block_table,
        longest_query=int(query_lengths.max()),
        longest_context=int(context_lengths.max()),
        context_tokens=tokens,
        has_past=bool((context_lengths > query_lengths).any()),
        queries_per_key=float((query_lengths.double() * context_lengths).sum()) / max(tokens, 1),
        parts=parts,
    )


def prefill_batches(
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    runs: Iterable[slice],
    most_gathered: int = 0,
) -> tuple[tuple[slice, PrefillBatch], ...]:
    """A batch of each of `runs` of these sequences, beside the rows of its tokens."""

    def batch_of(run: slice) -> tuple[slice, PrefillBatch]:
        starts = query_starts[run.start : run.stop + 1]
        batch = prefill_batch(
            starts - starts[0], context_lengths[run], lengths[run], block_table[run], most_gathered
        )
        return slice(int(starts[0]), int(starts[-1])), batch

    return tuple(map(batch_of, runs))


def runs_within(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of consecutive sequences, of `most` tokens together or a single longer one."""
    first = tokens = 0
    for i, length in enumerate(lengths):
        if i > first and tokens + length > most:
            yield slice(first, i)
            first, tokens = i, 0
        tokens += length
    if lengths:
        yield slice(first, len(lengths))


def prefill_attention(
    layer: PrefillLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of the batch's query tokens over their contexts, already cached.

    query [tokens, query_heads, query_size]; key [tokens, value_heads, key_width] and value [tokens,
    value_heads, value_size] are those tokens' own; kv_cache [blocks, value_heads, block_size, row],
    fp8 where the scales are given. Writes output [tokens, query_heads, value_size].

    Raises GacError if the kernel refuses the layer's head sizes.
    """
    g, quantized = layer.geometry, k_scale is not None
    kernel = kernel_for(layer, batch, kv_cache.shape[2], quantized)
    at = widths(kernel, layer.sizes, layer.capability)
    if at is None:
        raise GacError(f"{kernel} does not take heads of {layer.sizes} on this GPU")
    own = layer.is_plain and at == layer.sizes and not batch.has_past
    pages = layer.reads(kernel, kv_cache.shape[2], quantized)
    if batch.parts and not own and not pages:
        for rows, part in batch.parts:
            of_part = query[rows], key[rows], value[rows], kv_cache, part, output[rows]
            prefill_attention(layer, *of_part, k_scale, v_scale)
        return
    if own:
        keys, values, context = key, value, _after_each_other(batch)
    elif pages:
        keys = values = kv_cache.transpose(1, 2)  # [block, token, head, row]
        context = Context(
            batch.longest_context, lengths=batch.lengths, block_table=batch.block_table
        )
    else:
        keys = values = _gathered(layer, key, value, kv_cache, batch, k_scale, v_scale)
        context = _after_each_other(batch)
    attended = output
    if at[1] != g.value_size:
        attended = output.new_empty(*output.shape[:2], at[1])
    if at[0] != g.query_size:
        wide = query.new_empty(*query.shape[:2], at[0])
        copy_columns(query, wide)
        query = wide
    attend(
        kernel,
        query,
        keys[..., : at[0]],
        values[..., values.shape[-1] - at[1] :],
        batch.query_starts,
        batch.longest_query,
        context,
        layer.scale,
        layer.window,
        attended,
    )
    if attended is not output:
        copy_columns(attended, output, first=at[1] - layer.sizes[1])


def kernel_for(layer: PrefillLayer, batch: PrefillBatch, block_size: int, quantized: bool) -> str:
    """The layer's kernel; for a few tokens after a long past one that need not gather."""
    if layer.in_place is None or not batch.has_past:
        return layer.kernel
    if layer.reads(layer.kernel, block_size, quantized):
        return layer.kernel
    shared = layer.geometry.query_heads // layer.geometry.key_heads
    few = shared * batch.queries_per_key <= _FEW_QUERIES
    reads = layer.reads(layer.in_place, block_size, quantized)
    return layer.in_place if few and reads else layer.kernel


def _after_each_other(batch: PrefillBatch) -> Context:
    return Context(batch.longest_context, starts=batch.context_starts)


def _gathered(
    layer: PrefillLayer,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Whole rows of all sequences: of the cache, or of the step's own keys and values."""
    g = layer.geometry
    cached_keys, cached_values = kv_cache.split([g.key_width, g.value_size], dim=-1)
    source = Source(cached_keys, cached_values, batch.block_table, k_scale, v_scale)
    if not batch.has_past:
        source = Source(key, value)
    return gather_rows(
        source,
        batch.context_starts,
        batch.context_tokens,
        batch.longest_context,
        g,
        key.dtype,
        layer.latent,
    )
