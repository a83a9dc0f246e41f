"""Alignment rules: which dims a GPU's kernels run at full speed, and layouts padded to them.

A dim has a role: `head` (size of a key or value head), `rank` (of a factorized linear) or `width`
(MLP channels). The strategies go from rules of thumb to measurement:

    none      every dim is allowed
    minimal   multiples of 8: rows of 16 bytes in 16-bit types; other dims are far slower
    measured  of ranks and widths the fastest nearby dim according to the GPU's profile (see
              `_fastest_dim`); of head sizes as minimal: no kernel runs larger heads faster

Quantization adds multiples of its own (`QuantizationMultiples`): rows of 16 bytes hold more
elements in smaller types, and a block of weights that shares one scale must be whole.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import get_args

from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.rounding import round_up
from vllm_gac.layout.schema import Role, Strategy

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, slots=True)
class QuantizationMultiples:
    """The multiples that quantization requires.

    Attributes:
        linear: each side of every linear, and every rank, is a multiple of this.
        cache: each head's row in the KV cache is a multiple of this.
        rank: every rank is a multiple of this, too.
    """

    linear: int = 1
    cache: int = 1
    rank: int = 1

    def multiple(self, role: Role, heads: int = 1, tensor_parallel_size: int = 1) -> int:
        """The number that a dim must be a multiple of.

        Args:
            role: what the dim is.
            heads: number of heads whose sizes add up to one side of a linear; only for `head`.
            tensor_parallel_size: number of GPUs that share these heads.
        """
        if role != "head":
            return math.lcm(self.linear, self.rank) if role == "rank" else self.linear
        together = max(1, heads // tensor_parallel_size)
        return math.lcm(self.linear // math.gcd(self.linear, together), self.cache)


NOT_QUANTIZED = QuantizationMultiples()
# Elements of a row that share a scale, by our name: vLLM has one name for what is packed already.
GROUPS = {"w4a16": 128, "w4a16_group64": 64, "w4a16_group32": 32}
# Marlin multiplies by weights of which one side is a multiple of this, and the other one of half.
_MARLIN_TILE = 128
# Other keys are vLLM's names for quantization at load time. CUTLASS can pad other dims of FP8, but
# then it pads the activations in every step, as Marlin does. No two fused linear layers may share a
# block's scale.
LINEAR_MULTIPLES = {
    "fp8_per_tensor": 16,
    "fp8_per_channel": 16,
    "fp8_per_block": 128,
    "mxfp8": 32,
    "mxfp4": 32,
    **{name: max(group, _MARLIN_TILE // 2) for name, group in GROUPS.items()},
}
# Tokens of the GEMMs that tell which dims are fast, and their other dim.
_BATCHES, _FIXED = (1, 16, 128, 2048), 4096
# FlashAttention accepts only these head sizes with an FP8 cache.
FP8_CACHE_MULTIPLE = 16


def quantized_as(quantization: str | None, fp8_cache: bool = False) -> QuantizationMultiples:
    """The multiples for `quantization` (a key of LINEAR_MULTIPLES or None) and for an FP8 cache."""
    return QuantizationMultiples(
        LINEAR_MULTIPLES.get(quantization or "", 1),
        FP8_CACHE_MULTIPLE if fp8_cache else 1,
        _MARLIN_TILE if quantization in GROUPS else 1,
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
    """The smallest allowed dim that is at least `dim`.

    Args:
        dim: the dim to align.
        strategy: which dims are allowed (see the module's docstring).
        role: what the dim is.
        gpu: name of a shipped profile or path of a profile.json; only `measured` reads it.
        tensor_parallel_size: a `width` is split over this many GPUs, and each part is aligned.
            Head sizes and ranks are whole on every GPU.
        multiple: only multiples of this are allowed, on top of the strategy.

    Returns:
        The aligned dim of the whole model, not of one GPU.

    Raises:
        ProfileError: if the profile of `gpu` cannot be read.
    """
    parts = tensor_parallel_size if role == "width" else 1
    part = _align_part(-(-dim // parts), strategy, role, gpu)
    while part % multiple:
        part = _align_part(round_up(part, multiple), strategy, role, gpu)
    return parts * part


def allowed_dims(
    low: int,
    high: int,
    strategy: Strategy,
    role: Role = "head",
    gpu: str | None = None,
    *,
    tensor_parallel_size: int = 1,
    multiple: int = 1,
) -> Iterator[int]:
    """Every allowed dim from `low` to `high`, both included, ascending; see `align`."""
    more = {"tensor_parallel_size": tensor_parallel_size, "multiple": multiple}
    dim = low
    while (dim := align(dim, strategy, role, gpu, **more)) <= high:
        yield dim
        dim += 1


def aligned_dims(layout: ModelLayout) -> tuple[int, int]:
    """(number of multiples of 8, number of all) among the dims that compression may choose."""
    dims = [dim for _, _, dim in layout.dims()]
    return sum(align(dim, "minimal") == dim for dim in dims), len(dims)


def padded_layout(
    layout: ModelLayout,
    strategy: Strategy,
    gpu: str | None = None,
    tp: int = 1,
    quantized: QuantizationMultiples = NOT_QUANTIZED,
) -> ModelLayout:
    """`layout` with every dim that compression may choose padded to one that `strategy` allows.

    These dims are head sizes, MLP widths (the part on each of `tp` GPUs is padded by itself) and
    ranks. The numbers of heads do not change, because attention to a head of zeros would change
    the result. A rank never exceeds the full rank of its padded linear, which is misaligned only
    if the hidden size is. Rotary keys whose size differs from the model's heads get their own RoPE
    table. Padding a padded layout changes nothing. `quantized` is how weights and cache will be
    quantized; for the sides of linear layers, all heads on a GPU count together.

    Raises ProfileError if `strategy` is measured and there is no profile of `gpu`.
    """
    if strategy == "none":
        return layout

    @cache  # many layers have the same dims
    def grown(dim: int, role: Role, heads: int = 1) -> int:
        multiple = quantized.multiple(role, heads, tp)
        return align(dim, strategy, role, gpu, tensor_parallel_size=tp, multiple=multiple)

    def padded(layer: LayerLayout) -> LayerLayout:
        key_size = grown(layer.key.size, "head", layer.key.heads)
        rotary_grown = key_size != layer.key.size and not layer.key.is_latent
        rope_table = layer.key.rope_table or rotary_grown
        value_size = grown(layer.value.size, "head", layer.value.heads)
        width = layer.intermediate_size
        wide = replace(
            layer,
            key=replace(layer.key, size=key_size, rope_table=rope_table),
            value=replace(layer.value, size=value_size),
            intermediate_size=width if layout.experts else grown(width, "width"),
        )
        ranks = {
            name: min(grown(rank, "rank"), *layout.linear_shape(wide, name))
            for name, rank in layer.ranks.items()
        }
        return replace(wide, ranks=MappingProxyType(ranks))

    return replace(layout, layers=tuple(map(padded, layout.layers)))


def _align_part(dim: int, strategy: Strategy, role: Role, gpu: str | None) -> int:
    if strategy == "none":
        return dim
    if strategy == "measured" and role != "head":
        return _fastest_dim(dim, read_profile(gpu or DEFAULT_GPU))
    return round_up(dim, 8)


def _fastest_dim(dim: int, profile: GpuProfile) -> int:
    """The smallest of the fastest multiples of 8 from `dim` to the next multiple of 64.

    Other dims are far slower, and larger ones only more work: no tile is larger. Raises
    ProfileError if the profile has no times of linears.
    """
    dims = range(round_up(dim, 8), round_up(dim, 64) + 1, 8)
    times = {d: _log_time(d, profile) for d in dims}
    slowest = min(times.values()) + math.log1p(profile.noise)
    return next(d for d in dims if times[d] <= slowest)


@cache
def _log_time(dim: int, profile: GpuProfile) -> float:
    """Log of the geometric mean of GEMMs with `dim` as N and as K, and each number of tokens."""
    times = (
        gemm_microseconds(m, *shape, profile)
        for m in _BATCHES
        for shape in ((dim, _FIXED), (_FIXED, dim))
    )
    return sum(map(math.log, times)) / (2 * len(_BATCHES))
