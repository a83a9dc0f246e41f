"""The shape contract: which dims a GPU's kernels take at full speed.

A dim has a role: `head` (size of a key or value head), `rank` (of a factorized linear) or `width`
(MLP channels). Strategies, from the rules of thumb to the measurement:

    none        every dim, as it is
    minimal     multiples of 8: 16-byte rows in 16-bit types, without which kernels fall off a cliff
    optimal     multiples of 16, a tensor core tile
    predefined  head sizes that attention kernels are compiled for; otherwise as optimal
    measured    the fastest dim nearby by the GPU's profile (see measured_dims.py)

What quantization asks of dims comes on top, as multiples (`Quantized`): also rows of 16 bytes, of
more numbers, and whole blocks where every block has a scale of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from vllm_gac.alignment.fastest_dim import fastest_dim
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.rounding import ceil_div, round_up
from vllm_gac.layout.schema import Role, Strategy

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ROLES: tuple[Role, ...] = get_args(Role)

# Head sizes with FlashAttention or CPU kernels of their own in vLLM.
PREDEFINED_HEADS = (32, 64, 96, 112, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What must be a multiple of what: each side of every linear, each head's row in the cache."""

    linear: int = 1
    cache: int = 1

    def multiple(self, role: Role, heads: int = 1, tensor_parallel_size: int = 1) -> int:
        """What a dim must be a multiple of; a GPU's part of `heads` lies together in a linear."""
        if role != "head":
            return self.linear
        together = max(1, heads // tensor_parallel_size)
        return math.lcm(self.linear // math.gcd(self.linear, together), self.cache)


NOT_QUANTIZED = Quantized()
# By vLLM's names for quantizing while loading. CUTLASS pads other dims of FP8 by itself, the
# activations again in every step; a block's scale must not be shared by two fused linears.
LINEAR_MULTIPLES = {
    "fp8_per_tensor": 16,
    "fp8_per_channel": 16,
    "fp8_per_block": 128,
    "mxfp8": 32,
    "mxfp4": 32,
}
# FlashAttention takes no other head sizes from an FP8 cache.
FP8_CACHE_MULTIPLE = 16


def quantized_as(quantization: str | None, fp8_cache: bool = False) -> Quantized:
    """What one of LINEAR_MULTIPLES, or None, asks of dims, and an FP8 cache."""
    return Quantized(
        LINEAR_MULTIPLES.get(quantization or "", 1), FP8_CACHE_MULTIPLE if fp8_cache else 1
    )


def align(
    dim: int,
    strategy: Strategy,
    role: Role = "head",
    gpu: str | None = None,
    *,
    tensor_parallel_size: int = 1,
    multiple: int = 1,
) -> int:
    """The smallest allowed dim that is not below `dim`, among the multiples of `multiple`.

    A `width` is split over `tensor_parallel_size` GPUs, and each part is aligned; head sizes and
    ranks are whole on every GPU. `gpu` is the name of a shipped profile or the path of another
    one, and only `measured` asks for it. Raises PlanError for a dim below 1 or an unknown
    strategy or role, ProfileError for a profile that cannot be had.
    """
    if dim < 1 or tensor_parallel_size < 1:
        raise PlanError(f"dim {dim} over {tensor_parallel_size} GPUs: both must be at least 1")
    if role not in ROLES:
        raise PlanError(f"role {role!r}: expected {', '.join(ROLES)}")
    parts = tensor_parallel_size if role == "width" else 1
    part = _align_part(ceil_div(dim, parts), strategy, role, gpu)
    while part % multiple:
        part = _align_part(round_up(part, multiple), strategy, role, gpu)
    return parts * part


def candidates(
    low: int,
    high: int,
    strategy: Strategy,
    role: Role = "head",
    gpu: str | None = None,
    *,
    tensor_parallel_size: int = 1,
    multiple: int = 1,
) -> Iterator[int]:
    """Every allowed dim from `low` to `high`, both included, in ascending order."""
    more = {"tensor_parallel_size": tensor_parallel_size, "multiple": multiple}
    dim = low
    while (dim := align(dim, strategy, role, gpu, **more)) <= high:
        yield dim
        dim += 1


def aligned_dims(layout: ModelLayout) -> tuple[int, int]:
    """How many of the dims that compression may choose are multiples of 8, and their number."""
    dims = [dim for _, _, dim in layout.dims()]
    return sum(align(dim, "minimal") == dim for dim in dims), len(dims)


def _align_part(dim: int, strategy: Strategy, role: Role, gpu: str | None) -> int:
    match strategy:
        case "none":
            return dim
        case "minimal":
            return round_up(dim, 8)
        case "optimal":
            return round_up(dim, 16)
        case "predefined" if role == "head" and dim <= PREDEFINED_HEADS[-1]:
            return next(size for size in PREDEFINED_HEADS if size >= dim)
        case "predefined":
            return round_up(dim, 16)
        case "measured":
            return fastest_dim(dim, role, gpu)
    raise PlanError(f"strategy {strategy!r}: expected {', '.join(STRATEGIES)}")
