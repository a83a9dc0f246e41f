"""The cells of the grid, the most telling first, and the batches that each serves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines.whole_model.ideal import ITEMSIZE, Precision
from benchmarks.engines.whole_model.models import SHAPES, Batch, Model, Shape, models
from benchmarks.engines.whole_model.planned import REQUESTS, planned

BF16, FP8 = "bf16", "fp8"
# vLLM's own caches of four bits, by their names in vLLM.
FOUR_BITS = INT4, TURBOQUANT = ("int4_per_token_head", "turboquant_4bit_nc")
# Bytes of a cached number; those of four bits have scales in each head of 128, and TurboQuant
# leaves the first and the last two of 32 layers in 16 bits.
_CACHED = {BF16: ITEMSIZE, FP8: 1, INT4: 68 / 128, TURBOQUANT: (28 * 134 / 256 + 4 * ITEMSIZE) / 32}

# The forms of the grid; "latent-128" are latents in twos.
FORMS = ("dense", "heads-96-64", "heterogeneous", "latent-128", "planned-low-rank-80")
# Weights and cache of each: what users would run, what they run today, and one without the other.
PRECISIONS = ((FP8, FP8), (BF16, BF16), (FP8, BF16), (BF16, FP8))
# Beside the grid, in the first two precisions: other shares, MLPs alone, heads and latents of 64.
MORE_LOW_RANK = ("planned-low-rank-90", "planned-low-rank-70", "low-rank-mlp")
MORE_FORMS = ("latent-64", "heads-64-64", "planned")
# The dense model with our decode kernel in place of vLLM's attention: nothing is compressed.
OWN_ATTENTION = "dense-own-attention"
# Planned for FP8 weights and an FP8 cache, and so served in nothing else.
PLANNED_FP8 = "planned-fp8"
# Served as it is, which FP8 does not allow.
MISALIGNED = "low-rank-misaligned"
# Head sizes as PaLU leaves them, as they are and repaired.
PALU = ("palu-heads", "palu-heads-repaired")

# Decode at every batch in between, and long contexts.
LADDER = tuple(Batch(prompts, 128, 64, runs=2) for prompts in (2, 4, 8, 16, 32, 128, 256))
LONG = (Batch(16, 7680, 128, runs=1),)
_TINY_LADDER, _TINY_LONG = (Batch(2, 16, 4, runs=2),), (Batch(2, 200, 4, runs=1),)


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, the types of its weights and of its cache, and the batches to time."""

    model: str
    weights: str
    cache: str
    batches: tuple[Batch, ...]

    @property
    def name(self) -> str:
        """The name in files and tables."""
        return f"{self.model} {self.weights}+{self.cache}"

    @property
    def precision(self) -> Precision:
        """Bytes of a weight of a linear, and of a cached number."""
        return Precision(1 if self.weights == FP8 else ITEMSIZE, _CACHED[self.cache])

    @property
    def starts_cold(self) -> bool:
        """Whether its first start is to find no compiled code, so that starts can be compared."""
        return self.model in ("dense", "heterogeneous")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of LLM(...)."""
        weights = {"quantization": "fp8_per_tensor"} if self.weights == FP8 else {}
        own = {"attention_backend": "GAC"} if self.model == OWN_ATTENTION else {}
        return weights | own | ({} if self.cache == BF16 else {"kv_cache_dtype": self.cache})


def cells(shape: str) -> list[Cell]:
    """All cells, in the order in which they are measured."""
    grid = [(model, *types) for types in PRECISIONS for model in FORMS]
    low_rank = [(model, *types) for types in PRECISIONS[:2] for model in MORE_LOW_RANK]
    other = [(model, *types) for types in PRECISIONS[:2] for model in (OWN_ATTENTION, *MORE_FORMS)]
    # What users compare comes first: all forms in FP8, all in bf16.
    once = [(MISALIGNED, BF16, BF16), (PLANNED_FP8, FP8, FP8)]
    once += [(model, BF16, BF16) for model in PALU]
    once += [("dense", FP8, cache) for cache in FOUR_BITS]
    ordered = [*grid[:10], *low_rank, *once, *other, *grid[10:]]
    return [Cell(*named, _batches(shape, *named)) for named in ordered]


def chosen(every: Sequence[Cell], names: str | None) -> list[Cell]:
    """The cells of these names, separated by commas; all by default.

    Raises:
        SystemExit: There is no such cell.
    """
    if names is None:
        return list(every)
    known = {cell.name: cell for cell in every}
    asked = names.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise SystemExit(f"--cells: no cell {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in asked]


def models_by_name(dense: dict[str, Any]) -> Mapping[str, Callable[[], Model]]:
    """What makes each model; the planner is asked only for what is served."""
    fixed = {model.name: model for model in models(dense)}
    fixed[OWN_ATTENTION] = fixed["dense"]

    def made(name: str) -> Callable[[], Model]:
        return lambda: planned(name, dense) if name in REQUESTS else fixed[name]

    return {name: made(name) for name in (*fixed, *REQUESTS)}


def _batches(shape: str, model: str, weights: str, cache: str) -> tuple[Batch, ...]:
    """The five of the shape; for what is compared in long contexts or at every batch, these too."""
    of_shape: Shape = SHAPES[shape]
    if model == MISALIGNED:
        return of_shape.batches[:4]  # the fifth would take minutes
    ladder, long = (_TINY_LADDER, _TINY_LONG) if shape == "tiny" else (LADDER, LONG)
    if cache in FOUR_BITS or model == PLANNED_FP8:
        return (*of_shape.batches, *long)
    if (weights, cache) in PRECISIONS[:2] and (model == "dense" or "low-rank" in model):
        return (*of_shape.batches, *ladder, *long)
    return of_shape.batches
