"""Launch parameters of the decode kernels: pieces of the head sizes, tile, warps and stages."""

import functools
from dataclasses import dataclass

from vllm_gac.errors import GacError
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.layout.cache_geometry import CacheGeometry

_RESERVED = 1024  # bytes of shared memory that every program takes beside what it uses

# Tile, warps, stages and programs per multiprocessor for latent keys; the first that fits is taken.
# With an FP8 cache, two programs with tiles of 64 and two stages are up to 7 % faster than one with
# tiles of 128 and three (H200, 2026-11-25: 219 and 230 us for 8 latents of 128, 64 x 4096 tokens).
_LATENT = (
    (64, 4, 3, 2), (128, 8, 3, 1), (64, 4, 2, 2), (128, 8, 2, 1),
    (64, 4, 2, 1), (32, 4, 2, 1), (16, 2, 2, 1),
)  # fmt: skip
_FP8_LATENT = (
    (64, 4, 3, 2), (64, 4, 2, 2), (128, 8, 3, 1), (128, 8, 2, 1),
    (64, 4, 2, 1), (32, 4, 2, 1), (16, 2, 2, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters of a decode kernel; all follow from static facts.

    key_pieces, value_pieces: the powers of two into which the sizes are cut, 0 where absent. tile:
    tokens per step. stages: of the software pipeline. min_tiles: the fewest tiles of a program.
    """

    key_pieces: tuple[int, int, int]
    value_pieces: tuple[int, int, int]
    tile: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    min_tiles: int = 4


def pieces_of(
    width: int, start: int = 0, largest: int = 256, smallest: int = 16
) -> tuple[int, int, int]:
    """At most three powers of two, at least `smallest`, that add up to `width` or a little more.

    No piece is larger than `largest`, unless `width` is more than three times that.

    The largest piece comes first. The smallest comes first if the larger ones then begin on a whole
    cache line of 64 16-bit elements; the pieces begin `start` elements into a row. A piece that
    reaches past `width` comes last, and is masked.
    """
    pieces: list[int] = []
    remaining = width
    while 3 * largest < width:
        largest *= 2
    while remaining > 0:
        piece = min(largest, max(smallest, 1 << (remaining.bit_length() - 1)))
        if len(pieces) == 2 and piece < remaining:
            piece *= 2
        pieces.append(piece)
        remaining -= piece
    if remaining == 0 and start % 64:
        pieces.reverse()
    first, second, third = (*pieces, 0, 0)[:3]
    return first, second, third


def smallest_key_piece(itemsize: int) -> int:
    """The least columns of a piece of keys: tensor cores add up 16 at a time, byte_pairs.py 32."""
    return 32 if itemsize == 1 else 16


@functools.cache
def tiling_of(
    geometry: CacheGeometry,
    max_query_len: int,
    itemsize: int,
    latent_group: int = 0,
    capability: tuple[int, int] = HOPPER,
) -> Tiling:
    """The tiling for these head sizes.

    Measured on an H200 (2026-11-21) with batches of 1 to 256, over tiles of 16-128 tokens, 1-8
    warps, 3-6 stages and 1-24 programs per multiprocessor: one warp on 32 tokens is within 2 % of
    the best nearly everywhere. One warp waits at no barrier; its latencies are hidden by the other
    programs on the multiprocessor. Four programs are enough (2026-11-22): with six, large batches
    are at most 2 % faster, and batches of some ten thousand tokens, which are cut into more parts,
    8 to 20 % slower. Other GPUs get the same tiling, or as much of it as fits.

    Args:
        geometry: head counts and sizes.
        max_query_len: the most query tokens that a sequence has.
        itemsize: bytes of a cached element.
        latent_group: how many original KV heads one latent gives keys to; 0 for rotary keys.
        capability: compute capability of the GPU; any will do for the interpreter.

    Raises:
        GacError: the GPU's shared memory cannot hold a tile of such rows.
    """
    memory = shared_memory(capability)
    rows = max(16, geometry.query_heads // geometry.value_heads * max_query_len)
    if latent_group:
        return _latent_tiling(geometry, rows, itemsize, latent_group, capability)
    rows = 1 << (rows - 1).bit_length()  # what the kernel rounds them to
    # Pieces of 128 at most: keys and values then compute the same row addresses.
    key_pieces = pieces_of(geometry.key_width, largest=128, smallest=smallest_key_piece(itemsize))
    value_pieces = pieces_of(geometry.value_size, geometry.key_width, largest=128)
    # Never 4 warps: with 64 rows they use Hopper's matrix instructions (see _latent_tiling).
    warps = 2 if rows > 16 or geometry.value_size > 128 else 1
    row_bytes = (geometry.key_width + geometry.value_size) * itemsize
    # Half the bytes, and each number is converted: to keep up, fp8 needs more warps.
    if itemsize == 1:
        programs = 8 // warps
    elif warps == 1:
        programs = 4
    else:
        programs = 3 if row_bytes < 448 else 2
    for tile, stages in ((32, 3), (32, 2), (16, 3), (16, 2)):
        staged = tile * (stages - 1) * (sum(key_pieces) + sum(value_pieces)) * itemsize
        queries = 2 * rows * sum(key_pieces)
        # Pairs of fp8 columns make two products, each of half the columns (byte_pairs.py).
        columns = max(value_pieces) // (2 if itemsize == 1 else 1)
        needed = staged + queries + _exchanged(rows, columns, tile, warps) + _RESERVED
        if needed <= memory.program:
            programs = min(programs, memory.multiprocessor // needed)
            return Tiling(key_pieces, value_pieces, tile, warps, stages, programs)
    raise GacError(
        f"cache rows of {geometry.key_width + geometry.value_size} numbers: a decode kernel needs "
        f"{needed // 1024} KB of shared memory for them, {memory.program // 1024} KB is what the "
        "GPU gives it; serve smaller heads, or more value heads"
    )


def _exchanged(rows: int, columns: int, tile: int, warps: int) -> int:
    """Bytes of shared memory through which a program's threads exchange elements, for rotary keys.

    The threads of one warp exchange the 64-bit offset of each cache row of the tile. Triton gives
    each of two warps half of the longer side of a product: scores are [rows, tile], results at most
    [rows, columns]. If `rows` is the longer side of all of them, each warp needs only what it
    computed itself. Otherwise both need all weights, [rows, tile] 16-bit elements.
    """
    if warps == 1:
        return 8 * tile
    return 2 * rows * tile if rows < max(tile, columns) else 0


def _latent_tiling(
    geometry: CacheGeometry,
    rows: int,
    itemsize: int,
    latent_group: int,
    capability: tuple[int, int],
) -> Tiling:
    """The first tiling that fits: two programs per multiprocessor, one large one, smaller ones.

    64 rows never get 4 warps or more if tiles pass through registers, which they do if they are fp8
    or not aligned: ptxas up to 12.8 (Triton up to 3.7, torch up to 2.13) has a fault there. With 64
    rows and 4 warps, weights and values are multiplied by Hopper's asynchronous matrix
    instructions, which find a tile by a descriptor. A tile from registers is written to the place
    where the queries were before, so both descriptors share their address, and ptxas computes one
    of them from registers that nothing has written yet. Results are then wrong, or the address is
    invalid (tests/kernels/test_compiler.py). Tiles that are copied asynchronously have a place of
    their own.
    """
    memory = shared_memory(capability)
    # Pieces of 64 at most: the same threads then compute the row addresses of all pieces.
    key_pieces = pieces_of(geometry.key_size, largest=64, smallest=smallest_key_piece(itemsize))
    value_pieces = pieces_of(geometry.value_size, geometry.key_width, largest=64)
    latents = geometry.key_heads // geometry.value_heads
    padded = 1 << (geometry.query_size - 1).bit_length()
    up = 2 * latents * latent_group * padded * sum(key_pieces)
    copied = itemsize > 1 and geometry.key_size % 8 == geometry.value_size % 8 == 0
    row = latents * sum(key_pieces) + sum(value_pieces)
    # Hopper converts fp8 tiles in registers if there are few rows of queries. Otherwise they are
    # staged a second time, converted.
    in_registers = itemsize == 1 and capability[0] == 9 and rows <= 32
    converted = 2 if itemsize == 1 and not in_registers else 0  # bytes of an element
    for tile, warps, stages, programs in _FP8_LATENT if in_registers else _LATENT:
        # Queries are added below.
        staged = tile * row * ((stages - 1) * itemsize + converted)
        needed = up + staged + 2 * rows * padded + _RESERVED
        max_bytes = needed
        if capability[0] in (10, 11):
            # Blackwell's matrix instructions read all operands from shared memory: up to two more
            # stages, and the rebuilt keys.
            max_bytes = needed = needed + 2 * tile * row * itemsize + 4 * tile * padded
        elif capability[0] != 9 or warps < 4:
            max_bytes = needed = needed + 2 * tile * padded  # threads exchange keys there
        elif rows > 32:
            # Values are read asynchronously and so have one more stage. It is not counted in
            # `needed`: these tilings were measured like this, although sometimes only one of two
            # programs then has room.
            max_bytes += tile * sum(value_pieces) * itemsize
        fits = max_bytes <= memory.program and programs * needed <= memory.multiprocessor
        if fits and (copied or rows <= 32 or warps <= 2):
            return Tiling(key_pieces, value_pieces, tile, warps, stages, programs)
    raise GacError(
        f"latent keys: the up-projections of one value head take {up // 1024} KB of shared memory, "
        f"more than a decode kernel can hold of the GPU's {memory.program // 1024} KB; serve more "
        "value heads, or smaller latents"
    )
