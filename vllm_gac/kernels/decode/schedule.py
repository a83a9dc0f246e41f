"""How the tiles of a ragged batch are divided among a fixed number of programs.

A unit is one (sequence, value head); a tile is TILE tokens of it. All tiles of a batch form one
line, unit after unit, and every program takes the same number of consecutive tiles (stream-K, Osama
et al. 2023). So lengths may differ in any way, and the launch does not depend on them. A program
shares at most two units with others. One is the unit that it starts inside, whose partial result
goes to its slot 0; the other is the unit that it ends inside, whose partial result goes to slot 1.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
from typing import NamedTuple

import triton
import triton.language as tl

# Arguments of the kernels that differ between launches, or that are unknown when the kernels are
# compiled ahead (warmup.py). Specializing on them would gain nothing: where offsets into the
# cache are multiples of 8, the kernels know it from CacheRow.stride_unit.
# These and other arguments of a launch are positional, while constants are NamedTuples: in a tuple,
# Triton 3.6 to 3.9 specializes on every number, and a launch takes 3 us more of the CPU's time.
NOT_SPECIALIZED = (
    "programs",
    "multiprocessors",
    "sequences",
    "table_stride",
    "cache_block_stride",
    "cache_head_stride",
    "cache_token_stride",
)


class Tiles(NamedTuple):
    """How a batch is cut into tiles. All fields are compile-time constants.

    heads: value heads. sequences: an upper bound of the batch's sequences, as sequence_bound gives
    it. tile: tokens of a tile. window: tokens that a query sees, itself included; 0 without a
    sliding window. min_tiles: the fewest tiles that a program takes: merging more parts costs more
    than it gains.
    """

    heads: int
    sequences: int
    tile: int
    window: int
    min_tiles: int


class Unit(NamedTuple):
    """One (sequence, value head), and what one program reads of it. All fields are int32 scalars.

    head: the value head. length: tokens of the sequence's context, the new ones included.
    query_start: the sequence's first query token in the batch. queries: how many it has. first:
    the first tile of the context that a query sees. tiles: how many they see. skipped: how many of
    these other programs read before this program begins. here: how many this program reads.
    """

    head: tl.tensor
    length: tl.tensor
    query_start: tl.tensor
    queries: tl.tensor
    first: tl.tensor
    tiles: tl.tensor
    skipped: tl.tensor
    here: tl.tensor


def sequence_bound(sequences: int) -> int:
    """Tiles.sequences for a batch of `sequences`: a power of four, at least 16.

    There are few different values because each needs one more kernel to be compiled.
    """
    bits = (max(1, sequences) - 1).bit_length()
    return 1 << max(4, bits + bits % 2)


@triton.jit
def tile_range(length, queries, TILES: tl.constexpr):
    """The first tile, and one past the last, that the last `queries` tokens of a context see.

    The range is never empty: some program has to write the output of an empty sequence, too.
    """
    first = length * 0
    if TILES.window > 0:
        first = tl.maximum(length - queries - TILES.window + 1, 0) // TILES.tile
    return first, tl.maximum((length + TILES.tile - 1) // TILES.tile, first + 1)


@triton.jit
def tile_counts(query_start_loc, seq_lens, sequences, TILES: tl.constexpr):
    """Tiles per value head of every sequence, [TILES.sequences]; 0 past `sequences`."""
    index = tl.arange(0, TILES.sequences)
    present = index < sequences
    length = tl.load(seq_lens + index, mask=present, other=0)
    queries = length * 0
    if TILES.window > 0:
        queries = tl.load(query_start_loc + index + 1, mask=present, other=0)
        queries -= tl.load(query_start_loc + index, mask=present, other=0)
    first, last = tile_range(length, queries, TILES)
    return tl.where(present, last - first, 0)


@triton.jit
def tiles_per_program(counts, programs, multiprocessors, TILES: tl.constexpr):
    """How many tiles each program takes, and how many there are in all.

    A small batch is divided among two programs per multiprocessor, a larger one among all programs.
    No program takes fewer than min_tiles: one more part to merge costs as much as a few tiles.
    """
    total = tl.sum(counts) * TILES.heads
    share = (total + programs - 1) // programs
    few = 2 * multiprocessors
    return tl.maximum(share, tl.minimum((total + few - 1) // few, TILES.min_tiles)), total


@triton.jit
def program_share(
    query_start_loc, seq_lens, programs, multiprocessors, sequences, TILES: tl.constexpr
):
    """Where this program's tiles are in the line of all tiles.

    Returns scalars: `position` and `end`, its first tile and one past its last; `sequence`, to
    which its first tile belongs; and `before`, the tiles of all earlier sequences. The program has
    no tiles if position >= end.
    """
    counts = tile_counts(query_start_loc, seq_lens, sequences, TILES)
    share, total = tiles_per_program(counts, programs, multiprocessors, TILES)
    position = tl.program_id(0) * share
    end = tl.minimum(position + share, total)
    index = tl.arange(0, TILES.sequences)
    sequence = tl.sum((tl.cumsum(counts, 0) * TILES.heads <= position).to(tl.int32))
    before = tl.sum(tl.where(index < sequence, counts, 0)) * TILES.heads
    return position, end, sequence, before


@triton.jit
def next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILES: tl.constexpr):
    """The unit that the tile at `position` belongs to, and what this program reads of it."""
    length = tl.load(seq_lens + sequence)
    query_start = tl.load(query_start_loc + sequence)
    queries = tl.load(query_start_loc + sequence + 1) - query_start
    first, last = tile_range(length, queries, TILES)
    tiles = last - first
    head = (position - before) // tiles
    skipped = position - before - head * tiles
    here = tl.minimum(tiles - skipped, end - position)
    return Unit(
        head=head,
        length=length,
        query_start=query_start,
        queries=queries,
        first=first,
        tiles=tiles,
        skipped=skipped,
        here=here,
    )


@triton.jit
def leave_unit(unit, position, sequence, before, TILES: tl.constexpr):
    """`position`, `sequence` and `before` of the tile that follows what was read of `unit`."""
    position += unit.here
    if position - before == unit.tiles * TILES.heads:
        before = position
        sequence += 1
    return position, sequence, before
