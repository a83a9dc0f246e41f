"""The batch of one step, as every layer of our GPU backend sees it.

Decoding requests come first in a batch and run on our decode kernel. The other requests run on a
prefill kernel (attention/prefill.py), unless the step is small: then the GPU waits for the host,
and the decode kernel takes all requests at once, in one launch. It takes few query tokens of a
sequence, so a prompt counts as several sequences there, its pieces. A piece attends to its own
tokens and to what comes before them. All of these are in the cache: a step caches its tokens before
it attends. So prompts of small steps read an fp8 cache, as decoding requests do.

vLLM makes one builder of metadata for every class of heads and calls each of them in every step.
The first one builds the batch for all.
"""

from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_gac.layout.rounding import ceil_div
from vllm_gac.serving.attention.prefill import PrefillBatch, prefill_batches
from vllm_gac.serving.vllm_internals import step_scratch

# Most sequences in one prefill call. For more, FlashAttention 4 compiles other kernels, which takes
# seconds.
MAX_SEQUENCES = 256
# Most sequences, pieces of prompts included, of a step that the decode kernel takes as a whole.
MAX_PIECES = 256
# The attribute of vLLM's metadata under which builders share a step.
_NOTE = "gac_step"


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What the model's layers have in common; all builders have the same.

    Of a request that counts as decoding, there are at most `decode_query` query tokens.
    `gathered_tokens` is as `max_gathered_tokens` for `prefill_batch`. In a small step, pieces have
    at most `piece` tokens, and the contexts of pieces and decoding requests add up to `piece_keys`
    tokens at most. No step is small if `piece` is 0.
    """

    decode_query: int
    gathered_tokens: int
    piece: int = 0
    piece_keys: int = 0


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """What the decode kernel serves: all pieces of a small step, else the decoding requests.

    They are the first `tokens` rows of the step, of a sequence at most `max_query`. query_starts
    int32 [sequences + 1], lengths int32 [sequences] (up to the end of a piece), block_table int32
    [sequences, blocks] and `kernel_sequences` are as for decode_attention.
    """

    tokens: int
    query_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    max_query: int
    kernel_sequences: int | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of one step.

    `prefills` holds the requests that `decode` does not, in batches of at most MAX_SEQUENCES, each
    after the slice of rows that holds its tokens.
    """

    decode: DecodeBatch
    prefills: tuple[tuple[slice, PrefillBatch], ...]


def step_of(common: CommonAttentionMetadata, limits: StepLimits) -> StepBatch:
    """The batch that `common` describes, decoding requests first, built once for all builders.

    It is kept on `common`, together with the values that it was built from. vLLM makes a new
    `common` for every step; if one is changed in place, the batch is built again.
    """
    built_from = (
        common.query_start_loc,
        common.query_start_loc_cpu,
        common.seq_lens,
        common.seq_lens_cpu_upper_bound,
        common.block_table_tensor,
        common.num_actual_tokens,
        common.max_query_len,
        limits,
    )
    known: tuple[tuple[object, ...], StepBatch] | None = step_scratch(common).get(_NOTE)
    if known is not None and all(map(_same, known[0], built_from)):
        return known[1]
    step = build_step(common, limits)
    step_scratch(common)[_NOTE] = built_from, step
    return step


def _same(a: object, b: object) -> bool:
    """Tensors are compared by identity: their numbers may lie on a GPU."""
    return a is b or (isinstance(a, int | StepLimits) and a == b)


def build_step(common: CommonAttentionMetadata, limits: StepLimits) -> StepBatch:
    """The batch that `common` describes, decoding requests first."""
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=limits.decode_query
    )
    whole = _pieces(common, decodes, decodes + prefills, limits) if prefills else None
    if whole is not None:
        return StepBatch(whole, ())
    decode = DecodeBatch(
        tokens=decode_tokens,
        query_starts=common.query_start_loc[: decodes + 1],
        lengths=common.seq_lens[:decodes],
        block_table=common.block_table_tensor[:decodes],
        max_query=limits.decode_query,
    )
    return StepBatch(decode, _prefills(common, decodes, decodes + prefills, limits))


def _pieces(
    common: CommonAttentionMetadata, decodes: int, requests: int, limits: StepLimits
) -> DecodeBatch | None:
    """All requests, the prompts among them in pieces; None if the step is not small.

    The first `decodes` of them decode. Their lengths on the host are bounds. Those of the others
    are exact, unless requests verify drafts: then no step counts as small.
    """
    bounds = common.seq_lens_cpu_upper_bound
    tokens = common.num_actual_tokens
    most = requests + ceil_div(tokens, max(1, limits.piece))
    if not limits.piece or limits.decode_query > 1 or bounds is None or most > MAX_PIECES:
        return None
    contexts = bounds[:requests].tolist()
    if sum(contexts) > limits.piece_keys:
        return None
    starts = common.query_start_loc_cpu[: requests + 1].tolist()
    ends: list[int] = []
    lengths: list[int] = []
    owners: list[int] = []  # the request of each piece
    for request, context in enumerate(contexts):
        start, end = starts[request : request + 2]
        cuts = [*range(start + limits.piece, end, limits.piece), end]
        ends += cuts
        lengths += [context - end + cut for cut in cuts]
        owners += [request] * len(cuts)
    if sum(lengths) > limits.piece_keys:
        return None
    # One copy to the device, in which rows begin at multiples of 16 bytes: so the kernels that were
    # compiled ahead expect it.
    on_host = torch.zeros(3, MAX_PIECES, dtype=torch.int32)
    on_host[:, : len(ends)] = torch.tensor([ends, lengths, owners])
    on_device = on_host.to(common.seq_lens.device, non_blocking=True)
    piece_ends, piece_lengths, piece_owners = on_device[:, : len(ends)]
    piece_lengths[:decodes] = common.seq_lens[:decodes]
    return DecodeBatch(
        tokens=tokens,
        query_starts=torch.nn.functional.pad(piece_ends, (1, 0)),
        lengths=piece_lengths,
        block_table=common.block_table_tensor.index_select(0, piece_owners),
        max_query=limits.piece,
        kernel_sequences=MAX_PIECES,
    )


def _prefills(
    common: CommonAttentionMetadata, first: int, last: int, limits: StepLimits
) -> tuple[tuple[slice, PrefillBatch], ...]:
    """Requests `first` to `last`, in batches small enough for the kernels compiled ahead."""
    if first == last:
        return ()
    starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    # The bound is exact for prefilling requests, not for those that verify drafts. These come
    # before them, unless the backend of other layers orders the batch otherwise.
    fewest = int((starts[first + 1 : last + 1] - starts[first:last]).min())
    if lengths is None or 1 < limits.decode_query >= fewest:
        lengths = common.seq_lens.cpu()
    begins = range(first, last, MAX_SEQUENCES)
    return prefill_batches(
        starts,
        lengths,
        common.seq_lens,
        common.block_table_tensor,
        [slice(begin, min(begin + MAX_SEQUENCES, last)) for begin in begins],
        limits.gathered_tokens,
    )
