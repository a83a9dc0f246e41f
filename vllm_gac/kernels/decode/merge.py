"""Merges the partial results of a unit that several programs shared."""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from vllm_gac.kernels.decode.schedule import tile_counts, tiles_per_program


@triton.jit(do_not_specialize=["programs", "multiprocessors", "sequences"])
def merge(
    query_start_loc,
    seq_lens,
    output,
    partial_values,
    partial_log_sums,
    programs,
    multiprocessors,
    sequences,
    output_token_stride,
    output_head_stride,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: the partial results of one query head of one sequence, merged in order."""
    PARTIALS: tl.constexpr = 16
    sequence = tl.program_id(0)
    head, row_head = tl.program_id(1) // QUERIES.group, tl.program_id(1) % QUERIES.group
    counts = tile_counts(query_start_loc, seq_lens, sequences, TILES)
    share, _ = tiles_per_program(counts, programs, multiprocessors, TILES)
    index = tl.arange(0, TILES.sequences)
    count = tl.sum(tl.where(index == sequence, counts, 0))
    start = tl.sum(tl.where(index < sequence, counts, 0)) * TILES.heads + head * count
    first_program, last_program = start // share, (start + count - 1) // share
    if OVERLAP:
        # This kernel starts before the kernel that writes the parts has ended. All programs wait,
        # also those with nothing to merge: what follows must not start before the parts are done.
        gdc_wait()
    if first_program == last_program:
        return  # that program wrote the output itself
    query_start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - query_start
    column = tl.arange(0, WIDTH)
    for token in range(0, tl.minimum(queries, QUERIES.max_query_len)):
        row_max = tl.full([], -1e30, tl.float32)
        row_sum = tl.zeros([], tl.float32)
        acc = tl.zeros([WIDTH], tl.float32)
        for chunk in range(first_program, last_program + 1, PARTIALS):
            program = chunk + tl.arange(0, PARTIALS)
            slot = 2 * program + (program == first_program).to(tl.int32)
            query_row = token * QUERIES.group + row_head
            slot_row = slot * (QUERIES.group * QUERIES.max_query_len) + query_row
            mask = program <= last_program
            log_sum = tl.load(partial_log_sums + slot_row, mask=mask, other=float("-inf"))
            values = tl.load(
                partial_values + slot_row.to(tl.int64)[:, None] * VALUE_SIZE + column[None, :],
                mask=mask[:, None] & (column < VALUE_SIZE)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(row_max, tl.max(log_sum, 0))
            rescale = tl.exp2(row_max - new_max)
            weight = tl.exp2(log_sum - new_max)
            acc = acc * rescale + tl.sum(values * weight[:, None], 0)
            row_sum = row_sum * rescale + tl.sum(weight, 0)
            row_max = new_max
        result = acc * tl.where(row_sum > 0, 1 / row_sum, 0)
        out = output + (query_start + token).to(tl.int64) * output_token_stride
        out += tl.program_id(1) * output_head_stride
        tl.store(out + column, result.to(output.dtype.element_ty), mask=column < VALUE_SIZE)
