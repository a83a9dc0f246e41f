"""Prefill: brings each sequence's context into the form that the layer's kernel reads, and runs it.

A context takes one of three forms:

- The step's own keys and values, if they are the whole context.
- The packed cache itself, if the kernel reads pages.
- Rows gathered from the cache, once per chunk (kernels/gather_context.py), of as many sequences at
  once as attention/prefill_memory.py allows.

For a few new tokens after a long past, a kernel that reads pages is used where there is one, even
if it pads heads: gathering would take longer.

Some kernels take only equal key and value sizes. They get views of the larger size over the packed
rows: keys begin at the front of a row, values end at its end. Where keys are widened, queries are
padded with zeros. Where values are widened, the surplus columns in front of the result are dropped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import widths
from vllm_gac.kernels.copy_columns import copy_columns
from vllm_gac.kernels.gather_context import KeyValueSource, gather_rows
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention.prefill_kernels import ContextLayout, attend, reads_pages

# Query heads x new tokens that attend to each gathered key. With fewer, gathering takes longer than
# the padding of FlashAttention 3. On an H200 both take the same time at 1300 to 2500.
_FEW_QUERIES = 1024


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The prefilling sequences of one step.

    query_starts and context_starts are int32 [sequences + 1], cumulative lengths. lengths is int32
    [sequences], the context lengths with new tokens included. block_table is int32 [sequences,
    blocks]. If rows must be gathered and are too many to be gathered at once, the batch runs in
    `parts`, each after the slice of rows that holds its tokens.
    """

    query_starts: torch.Tensor
    context_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    context_tokens: int
    has_past: bool  # whether any sequence had tokens cached before
    queries_per_key: float  # new tokens that attend to a context token, averaged over those
    parts: tuple[tuple[slice, "PrefillBatch"], ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """What prefill needs to know about a layer.

    `kernel` is one of `gpu.attention_choice.PREFILL_KERNELS`. `in_place` is another one that reads
    pages, if there is one. `scale` is the softmax scale; `window` counts the tokens that a query
    sees.
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
        """The smallest key and value sizes at which kernels take these heads."""
        return self.geometry.head_sizes

    @property
    def is_plain(self) -> bool:
        """Whether a kernel could take cached rows as they are."""
        geometry = self.geometry
        aligned = (geometry.key_size, geometry.value_size) == self.sizes
        equal_heads = geometry.key_heads == geometry.value_heads
        return self.latent is None and equal_heads and aligned

    def reads(self, kernel: str, block_size: int, quantized: bool) -> bool:
        """Whether `kernel` reads cached rows from their pages of `block_size` tokens."""
        kernel_sizes = widths(kernel, self.sizes, self.capability)
        if kernel_sizes is None or quantized or not self.is_plain:
            return False
        return reads_pages(kernel, max(kernel_sizes), block_size)


def prefill_batch(
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    max_gathered_tokens: int = 0,
) -> PrefillBatch:
    """Describe a batch of n sequences.

    Args:
        query_starts: Cumulative numbers of new tokens, [n + 1] on the host; the first is 0.
        context_lengths: Context lengths, new tokens included, [n] on the host.
        lengths: The same context lengths on the device, int32 [n].
        block_table: Pages of each sequence, int32 [n, blocks] on the device.
        max_gathered_tokens: Tokens of context that are gathered at once; 0 for no limit. A single
            longer sequence is gathered as a whole.
    """
    query_lengths = query_starts[1:] - query_starts[:-1]
    context_starts = pad(context_lengths.cumsum(0), (1, 0))
    starts = torch.stack([query_starts, context_starts]).int()
    on_device = starts.to(lengths.device, non_blocking=True)  # one copy for both tensors
    tokens = int(context_starts[-1])
    parts: tuple[tuple[slice, PrefillBatch], ...] = ()
    if max_gathered_tokens and tokens > max_gathered_tokens and len(context_lengths) > 1:
        runs = runs_within(context_lengths.tolist(), max_gathered_tokens)
        parts = prefill_batches(query_starts, context_lengths, lengths, block_table, runs)
    return PrefillBatch(
        query_starts=on_device[0],
        context_starts=on_device[1],
        lengths=lengths,
        block_table=block_table,
        max_seqlen_q=int(query_lengths.max()),
        max_seqlen_k=int(context_lengths.max()),
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
    max_gathered_tokens: int = 0,
) -> tuple[tuple[slice, PrefillBatch], ...]:
    """One batch for each of `runs` of these sequences, after the slice of its token rows."""

    def batch_of(run: slice) -> tuple[slice, PrefillBatch]:
        starts = query_starts[run.start : run.stop + 1]
        batch = prefill_batch(
            starts - starts[0],
            context_lengths[run],
            lengths[run],
            block_table[run],
            max_gathered_tokens,
        )
        return slice(int(starts[0]), int(starts[-1])), batch

    return tuple(map(batch_of, runs))


def runs_within(lengths: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Runs of consecutive sequences: at most `max_tokens` tokens, or one longer sequence."""
    first = tokens = 0
    for i, length in enumerate(lengths):
        if i > first and tokens + length > max_tokens:
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
    """Causal attention of the batch's new tokens over their contexts, which are already cached.

    Raises GacError if the kernel of the layer does not take its head sizes.

    Args:
        layer: Heads and kernels of the layer.
        query: [tokens, query_heads, query_size].
        key: Keys of the new tokens, [tokens, value_heads, key_width].
        value: Values of the new tokens, [tokens, value_heads, value_size].
        kv_cache: [blocks, value_heads, block_size, row]; fp8 if scales are given.
        batch: The sequences that the tokens belong to.
        output: [tokens, query_heads, value_size]; is overwritten.
        k_scale, v_scale: Scales of an fp8 cache's keys and values; None if it is not fp8.
    """
    geometry, quantized = layer.geometry, k_scale is not None
    kernel = kernel_for(layer, batch, kv_cache.shape[2], quantized)
    kernel_sizes = widths(kernel, layer.sizes, layer.capability)
    if kernel_sizes is None:
        raise GacError(f"{kernel} does not take heads of {layer.sizes} on this GPU")
    kernel_key_size, kernel_value_size = kernel_sizes
    from_step = layer.is_plain and kernel_sizes == layer.sizes and not batch.has_past
    from_pages = layer.reads(kernel, kv_cache.shape[2], quantized)
    if batch.parts and not from_step and not from_pages:
        for rows, part in batch.parts:
            part_tensors = query[rows], key[rows], value[rows], kv_cache, part, output[rows]
            prefill_attention(layer, *part_tensors, k_scale, v_scale)
        return
    if from_step:
        keys, values, context = key, value, _contiguous_context(batch)
    elif from_pages:
        keys = values = kv_cache.transpose(1, 2)  # [block, token, head, row]
        context = ContextLayout(
            batch.max_seqlen_k, lengths=batch.lengths, block_table=batch.block_table
        )
    else:
        keys = values = _gathered_rows(layer, key, value, kv_cache, batch, k_scale, v_scale)
        context = _contiguous_context(batch)
    attended = output
    if kernel_value_size != geometry.value_size:
        attended = output.new_empty(*output.shape[:2], kernel_value_size)
    if kernel_key_size != geometry.query_size:
        wide = query.new_empty(*query.shape[:2], kernel_key_size)
        copy_columns(query, wide)
        query = wide
    attend(
        kernel,
        query,
        keys[..., :kernel_key_size],
        values[..., values.shape[-1] - kernel_value_size :],
        batch.query_starts,
        batch.max_seqlen_q,
        context,
        layer.scale,
        layer.window,
        attended,
    )
    if attended is not output:
        copy_columns(attended, output, first=kernel_value_size - layer.sizes[1])


def kernel_for(layer: PrefillLayer, batch: PrefillBatch, block_size: int, quantized: bool) -> str:
    """The layer's kernel, or `in_place` for a few new tokens after a long past."""
    if layer.in_place is None or not batch.has_past:
        return layer.kernel
    if layer.reads(layer.kernel, block_size, quantized):
        return layer.kernel
    heads_per_key = layer.geometry.query_heads // layer.geometry.key_heads
    few = heads_per_key * batch.queries_per_key <= _FEW_QUERIES
    reads = layer.reads(layer.in_place, block_size, quantized)
    return layer.in_place if few and reads else layer.kernel


def _contiguous_context(batch: PrefillBatch) -> ContextLayout:
    return ContextLayout(batch.max_seqlen_k, starts=batch.context_starts)


def _gathered_rows(
    layer: PrefillLayer,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Rows of all contexts, one sequence after the other.

    They come from the cache, or from the step's own keys and values if no sequence has a past.
    """
    geometry = layer.geometry
    sizes = [geometry.key_width, geometry.value_size]
    cached_keys, cached_values = kv_cache.split(sizes, dim=-1)
    source = KeyValueSource(cached_keys, cached_values, batch.block_table, k_scale, v_scale)
    if not batch.has_past:
        source = KeyValueSource(key, value)
    return gather_rows(
        source,
        batch.context_starts,
        batch.context_tokens,
        batch.max_seqlen_k,
        geometry,
        key.dtype,
        layer.latent,
    )
