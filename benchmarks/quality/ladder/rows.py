"""The rows of the ladder's table: which compressions are measured, by their names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from vllm_gac.errors import GacError
from vllm_gac.planning.request import PlanRequest

# What names of rows end with; the row without that end is what such a row is compared with.
DENSE, FREE, PLAIN = "dense", ", free dims", ", plain fits"
HEALED, FP8 = ", healed", ", FP8 + FP8 KV"
# The dense model as vLLM computes it in bf16.
SERVED = f"{DENSE}, served"
_ALL = ("heads", "prune", "lowrank")
# A commit before the planner could choose between narrower MLPs and low-rank linears of them, and
# before the kernels of low-rank linears were predicted.
_EARLIER = "f5049a0"
OTHER_DIMS = (
    "Rows of all methods were planned when no MLP that might be pruned could have low-rank "
    "linears. Today's plans may have other dims, and lose less."
)
OTHER_TIMES = (
    "Times were predicted when low-rank linears counted as GEMMs, and a norm or a rotation as the "
    "bytes that it moves. Today's predictions differ."
)
_FP8, _FP8_CACHE = "fp8_per_tensor", "fp8"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to make a model smaller.

    Attributes:
        request: The budgets of a compression; None: the dense model.
        plain_fits: Whether every linear is fitted by itself, on what the dense model feeds it and
            to its own output, instead of refitting layers and weighting by gradients.
        healed: Whether the compressed model is trained by `vllm-gac heal`.
        served: Whether vLLM computes the losses, in the model's dtype, and not the fp32 reference.
        quantization: vLLM's --quantization, of a served row.
        kv_cache_dtype: vLLM's --kv-cache-dtype, likewise.
    """

    request: PlanRequest | None
    plain_fits: bool = False
    healed: bool = False
    served: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


def _aligned_and_free(name: str, request: PlanRequest) -> dict[str, Row]:
    """The same budgets with aligned dims, and with every dim allowed."""
    return {name: Row(request), f"{name}{FREE}": Row(replace(request, align="none"))}


def _fp8(name: str, request: PlanRequest | None, *, healed: bool = False) -> dict[str, Row]:
    """FP8 weights and FP8 KV cache, on dims that need no padding for them."""
    fp8 = {"quantization": _FP8, "kv_cache_dtype": _FP8_CACHE}
    if request is not None:
        request = replace(request, **fp8)
    row = Row(request, healed=healed, served=True, **fp8)
    return {f"{name}{HEALED if healed else ''}{FP8}": row}


# The budgets with a goal.
GOALS: Mapping[str, PlanRequest] = {
    "low rank .8": PlanRequest(param_ratio=0.8, methods=("lowrank",)),
    "heads + MLP .8, KV .75": PlanRequest(param_ratio=0.8, kv_ratio=0.75),
    "all methods .8, KV .5": PlanRequest(param_ratio=0.8, kv_ratio=0.5, methods=_ALL),
    "heads + MLP .7, KV .5": PlanRequest(param_ratio=0.7, kv_ratio=0.5),
}

# The rows with a goal first: a lease may end before the last one.
ROWS: Mapping[str, Row] = {
    DENSE: Row(None),
    **{
        name: row
        for goal, request in GOALS.items()
        for name, row in (
            *_aligned_and_free(goal, request).items(),
            (f"{goal}{PLAIN}", Row(request, plain_fits=True)),
        )
    },
    **{
        name: row
        for kv in (0.5, 0.75, 0.25)
        for form in ("latent", "rotary")
        for name, row in _aligned_and_free(
            f"KV {kv:g} {form}".replace("0.", "."),
            PlanRequest(kv_ratio=kv, methods=("heads",), key_form=form),
        ).items()
    },
    **_aligned_and_free("low rank .9", PlanRequest(param_ratio=0.9, methods=("lowrank",))),
    **_aligned_and_free("low rank .7", PlanRequest(param_ratio=0.7, methods=("lowrank",))),
    **{f"{goal}{HEALED}": Row(request, healed=True) for goal, request in GOALS.items()},
    SERVED: Row(None, served=True),
    f"{DENSE}, FP8": Row(None, served=True, quantization=_FP8),
    f"{DENSE}, FP8 KV": Row(None, served=True, kv_cache_dtype=_FP8_CACHE),
    **_fp8(DENSE, None),
    **{
        name: row
        for healed in (False, True)
        for goal, request in GOALS.items()
        for name, row in _fp8(goal, request, healed=healed).items()
    },
}


def had_other_dims(budget: str, commit: str) -> bool:
    """Whether rows of `budget` that `commit` measured have dims that are not planned any more.

    Then an MLP that might be pruned could not have low-rank linears.
    """
    return budget.startswith("all methods") and commit.startswith(_EARLIER)


def had_other_times(commit: str) -> bool:
    """Whether the times of rows that `commit` measured would be predicted otherwise today."""
    return commit.startswith(_EARLIER)


def is_variant(name: str) -> bool:
    """Whether a row is only there to be compared with the one of the same budget."""
    return name.endswith((FREE, PLAIN))


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of ROWS that match one of the `patterns`. Raises GacError for one without any."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in ROWS):
            raise GacError(f"{pattern}: no such row; there are {'; '.join(ROWS)}")
    return [name for name in ROWS if any(fnmatch(name, pattern) for pattern in patterns)]
