"""The batch of one step, as every layer of our GPU backend sees it.

vLLM makes one builder of metadata for every class of heads and calls each of them in every step.
The first one builds the batch for all.
"""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_gac.serving.attention.prefill import PrefillBatch, prefill_batches
from vllm_gac.serving.vllm_internals import step_scratch

# Most sequences in one prefill call. For more, FlashAttention 4 compiles other kernels, which takes
# seconds.
MAX_SEQUENCES = 256
# The attribute of vLLM's metadata under which builders share a step.
_NOTE = "gac_step"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one step, as every layer sees it.

    decode_query_starts int32 [requests + 1], decode_lengths int32 [requests] (context lengths) and
    decode_block_table int32 [requests, blocks] describe the decoding requests, whose tokens are the
    first `decode_tokens` rows. `prefills` holds the other requests, in batches of at most
    MAX_SEQUENCES, each after the slice of rows that holds its tokens.
    """

    decode_tokens: int
    decode_query_starts: torch.Tensor
    decode_lengths: torch.Tensor
    decode_block_table: torch.Tensor
    max_decode_query: int
    prefills: tuple[tuple[slice, PrefillBatch], ...]


def step_of(
    common: CommonAttentionMetadata, max_decode_query: int, max_gathered_tokens: int
) -> StepBatch:
    """The batch that `common` describes, decoding requests first, built once for all builders.

    It is kept on `common`, together with the values that it was built from. vLLM makes a new
    `common` for every step; if one is changed in place, the batch is built again. Of a request that
    counts as decoding, there are at most `max_decode_query` query tokens; `max_gathered_tokens` is
    as for `prefill_batch`.
    """
    built_from = (
        common.query_start_loc,
        common.query_start_loc_cpu,
        common.seq_lens,
        common.seq_lens_cpu_upper_bound,
        common.block_table_tensor,
        common.num_actual_tokens,
        common.max_query_len,
        max_decode_query,
        max_gathered_tokens,
    )
    known: tuple[tuple[object, ...], StepBatch] | None = step_scratch(common).get(_NOTE)
    if known is not None and all(map(_same, known[0], built_from)):
        return known[1]
    step = build_step(common, max_decode_query, max_gathered_tokens)
    step_scratch(common)[_NOTE] = built_from, step
    return step


def _same(a: object, b: object) -> bool:
    """Tensors are compared by identity: their numbers may lie on a GPU."""
    return a is b or (isinstance(a, int) and a == b)


def build_step(
    common: CommonAttentionMetadata, max_decode_query: int, max_gathered_tokens: int
) -> StepBatch:
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=max_decode_query
    )
    return StepBatch(
        decode_tokens=decode_tokens,
        decode_query_starts=common.query_start_loc[: decodes + 1],
        decode_lengths=common.seq_lens[:decodes],
        decode_block_table=common.block_table_tensor[:decodes],
        max_decode_query=max_decode_query,
        prefills=_prefills(
            common, decodes, decodes + prefills, max_decode_query, max_gathered_tokens
        ),
    )


def _prefills(
    common: CommonAttentionMetadata,
    first: int,
    last: int,
    max_decode_query: int,
    max_gathered_tokens: int,
) -> tuple[tuple[slice, PrefillBatch], ...]:
    """Requests `first` to `last`, in batches small enough for the kernels compiled ahead."""
    if first == last:
        return ()
    starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    # The bound is exact for prefilling requests, not for those that verify drafts. These come
    # before them, unless the backend of other layers orders the batch otherwise.
    fewest = int((starts[first + 1 : last + 1] - starts[first:last]).min())
    if lengths is None or 1 < max_decode_query >= fewest:
        lengths = common.seq_lens.cpu()
    begins = range(first, last, MAX_SEQUENCES)
    return prefill_batches(
        starts,
        lengths,
        common.seq_lens,
        common.block_table_tensor,
        [slice(begin, min(begin + MAX_SEQUENCES, last)) for begin in begins],
        max_gathered_tokens,
    )
