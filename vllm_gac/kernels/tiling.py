"""How the decode kernel is cut for a geometry: pieces of the head sizes, tile, warps, stages."""

import functools
from dataclasses import dataclass

from vllm_gac.errors import GacError
from vllm_gac.kernels.reference import CacheGeometry

SHARED_MEMORY = 228 * 1024  # bytes a multiprocessor gives its programs on Hopper


@dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters of the decode kernel; all follow from static facts.

    tile: tokens a step; least_tiles: a program takes no fewer.
    """

    key_pieces: tuple[int, int, int]
    value_pieces: tuple[int, int, int]
    tile: int
    warps: int
    stages: int
    programs_per_multiprocessor: int
    least_tiles: int = 4


def pieces_of(width: int, start: int = 0, largest: int = 256) -> tuple[int, int, int]:
    """At most three powers of two from 16 up that add up to `width`, or to a little more.

    None is larger than `largest`, while three of that are enough.

    Largest first; smallest first where that lets the larger ones begin on a whole cache line of 64
    16-bit numbers, `start` numbers into a row. What reaches past `width` comes last, and is masked.
    """
    pieces: list[int] = []
    remaining = width
    while 3 * largest < width:
        largest *= 2
    while remaining > 0:
        piece = min(largest, max(16, 1 << (remaining.bit_length() - 1)))
        if len(pieces) == 2 and piece < remaining:
            piece *= 2
        pieces.append(piece)
        remaining -= piece
    if remaining == 0 and start % 64:
        pieces.reverse()
    first, second, third = (*pieces, 0, 0)[:3]
    return first, second, third


@functools.cache
def tiling_of(
    geometry: CacheGeometry, max_query_len: int, itemsize: int, latent_group: int = 0
) -> Tiling:
    """The tiling for these head sizes; `itemsize` is the bytes of a cached number.

    `latent_group` is how many original KV heads one latent gives keys to, 0 for rotary keys.
    Measured on an H200 (2026-11-21), batches of 1 to 256, over tiles of 16-128 tokens, 1-8 warps,
    3-6 stages and 1-24 programs a multiprocessor: one warp on 32 tokens is within 2 % of the best
    nearly everywhere. It meets no barrier; what hides its latencies is its neighbours. Four of them
    are enough (2026-11-22): with six, large batches are at most 2 % faster, and those of some ten
    thousand tokens, cut into more parts, 8 to 20 % slower.

    Raises GacError if the up-projections of one cache row do not fit into shared memory.
    """
    if latent_group:
        return _latent_tiling(geometry, max_query_len, itemsize, latent_group)
    row_bytes = (geometry.key_width + geometry.value_size) * itemsize
    rows = geometry.query_heads // geometry.value_heads * max_query_len
    # Never 64 rows on 4 warps: Triton 3.6 then takes Hopper's asynchronous matrix instructions,
    # with which fp8 caches, converted on the way, come out wrong.
    warps = 2 if rows > 16 or geometry.value_size > 128 else 1
    # fp8: what limits is converting it, so all the warps there is room for.
    if itemsize == 1:
        programs = 8 // warps
    elif warps == 1:
        programs = 4
    else:
        programs = 3 if row_bytes < 448 else 2
    # Of 128 at most: keys and values then find their rows by the same addresses.
    key_pieces = pieces_of(geometry.key_width, largest=128)
    value_pieces = pieces_of(geometry.value_size, geometry.key_width, largest=128)
    return Tiling(key_pieces, value_pieces, 32, warps, 3, programs)


def _latent_tiling(
    geometry: CacheGeometry, max_query_len: int, itemsize: int, latent_group: int
) -> Tiling:
    """The first that fits of: two programs a multiprocessor, one large one, ever smaller ones."""
    # Pieces of 64 at most: rows of all pieces are then found by the same threads.
    key_pieces = pieces_of(geometry.key_size, largest=64)
    value_pieces = pieces_of(geometry.value_size, geometry.key_width, largest=64)
    latents = geometry.key_heads // geometry.value_heads
    rows = max(16, geometry.query_heads // geometry.value_heads * max_query_len)
    padded = 1 << (geometry.query_size - 1).bit_length()
    up = 2 * latents * latent_group * padded * sum(key_pieces)
    fp8_rows = itemsize == 1 and rows > 32  # see above
    for tile, warps, stages, programs in (
        (64, 4, 3, 2), (128, 8, 3, 1), (64, 4, 2, 2), (128, 8, 2, 1),
        (64, 4, 2, 1), (32, 4, 2, 1), (16, 2, 2, 1),
    ):  # fmt: skip
        row = latents * sum(key_pieces) + sum(value_pieces)
        # fp8 tiles are staged twice, once converted. Then queries, and what each program reserves.
        staged = tile * row * ((stages - 1) * itemsize + 2 * (itemsize == 1))
        needed = up + staged + 2 * rows * padded + 1024
        if programs * needed <= SHARED_MEMORY and not (fp8_rows and warps > 2):
            return Tiling(key_pieces, value_pieces, tile, warps, stages, programs)
    raise GacError(
        f"latent keys: the up-projections of one value head take {up // 1024} KB of shared memory, "
        f"more than a decode kernel can hold; serve more value heads, or smaller latents"
    )
