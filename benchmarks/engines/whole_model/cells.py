"""The cells, each a model in one precision, the most telling first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

BF16: Final = "bf16"
FP8: Final = "fp8"
# vLLM's own caches of four bits, by their names in vLLM.
FOUR_BITS = ("int4_per_token_head", "turboquant_4bit_nc")
DENSE = "dense"
# The dense model with our decode kernel: nothing is compressed.
OWN_ATTENTION = "dense-own-attention"
# And with our layers, which in FP8 quantize in norms and SwiGLU.
OWN_LAYERS = "dense-own-layers"
# How two GPUs share a model.
TP2, PP2 = "TP 2", "PP 2"
SPLITS = {"": {}, TP2: {"tensor_parallel_size": 2}, PP2: {"pipeline_parallel_size": 2}}


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, the types of its weights and of its cache, and the split over GPUs, of SPLITS."""

    model: str
    weights: str
    cache: str
    split: str = ""

    @property
    def name(self) -> str:
        """The name in files and tables."""
        return f"{self.model} {self.weights}+{self.cache} {self.split}".rstrip()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of LLM(...)."""
        weights = {"quantization": "fp8_per_tensor"} if self.weights == FP8 else {}
        cache = {} if self.cache == BF16 else {"kv_cache_dtype": self.cache}
        return weights | cache | SPLITS[self.split]


_FORMS = (DENSE, OWN_ATTENTION, "heads-96-64", "planned", "latent-64")
CELLS = tuple(
    Cell(*named)
    for named in (
        (DENSE, FP8, FP8),
        ("planned-fp8", FP8, FP8),
        *((form, FP8, FP8) for form in _FORMS[1:]),
        (OWN_LAYERS, FP8, FP8),
        *((DENSE, FP8, cache) for cache in FOUR_BITS),
        *((form, BF16, BF16) for form in _FORMS),
        ("palu-heads", BF16, BF16),
        ("palu-heads-repaired", BF16, BF16),
    )
)
# What is gained without compression.
FREE = tuple(Cell(model, FP8, FP8) for model in (DENSE, OWN_ATTENTION, OWN_LAYERS))
# On two GPUs and on one.
TWO_GPUS = tuple(
    Cell(model, FP8, FP8, split)
    for split in (TP2, PP2, "")
    for model in (DENSE, "planned-fp8-tp2", OWN_ATTENTION)
)


def chosen(names: str | None) -> Sequence[Cell]:
    """The cells of these names, separated by commas; all by default.

    Raises:
        SystemExit: There is no such cell.
    """
    if names is None:
        return CELLS
    known = {cell.name: cell for cell in CELLS}
    asked = names.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise SystemExit(f"--cells: no cell {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in asked]
