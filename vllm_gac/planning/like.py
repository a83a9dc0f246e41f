"""Planning again: aligned dims near those of another tool, within what its dims spend.

Other tools choose dims without regard to GPUs. As in the GAC paper, candidates are the aligned dims
near theirs, and one knapsack chooses under the budgets that their dims spend. Without statistics of
the model, losses are those of other models (prior_losses.py), scaled for every part of every layer
so that a parameter more is worth the same everywhere: the tool's dims are then the best ones that
spend as much, and a dim is worth the more, the more of it the tool kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, RootModel

from vllm_gac.alignment.rules import align
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.methods.base import Curve
from vllm_gac.compression.methods.registry import METHODS, component_of, methods_of
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.importers.factorized import check_linears
from vllm_gac.importers.imported import Imported
from vllm_gac.importers.open_any import open_source
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, breakeven_rank
from vllm_gac.layout.schema import Dim, validate
from vllm_gac.planning.losses import Losses, prior_losses
from vllm_gac.planning.request import PlanRequest

# What the budgets' ratios are rounded up to. Times the parameters of a model, it is below one.
_RATIO_UNIT = 10**12
# What the last numbers of a dim lose is next to nothing. So a dim that a tool kept nearly whole is
# worth as much as if it had kept this share.
_MAX_SHARE = Fraction(15, 16)
# What the methods change, of ModelLayout; nothing else may differ.
_SAME = {
    "hidden_size": "hidden states of",
    "head_dim": "heads of",
    "num_key_value_heads": "KV heads:",
    "qk_norm": "norms of keys:",
}


class _Ranks(RootModel[dict[str, Dim]]):
    model_config = ConfigDict(frozen=True, strict=True)


@dataclass(frozen=True, slots=True)
class OtherPlan:
    """What another tool made of a dense model.

    Attributes:
        made_by: The format of its files, or "ranks".
        dense: The layout of the dense model.
        layout: The dense model with layers of the dims that the tool chose. Its lm_head is whole.
    """

    made_by: str
    dense: ModelLayout
    layout: ModelLayout

    @property
    def notes(self) -> dict[str, Any]:
        """What a plan says of it: how many dims it changed, and how many of these are aligned."""
        dense_dims = {*self.dense.dims()}
        changed = [dim for dim in self.layout.dims() if dim not in dense_dims]
        aligned = sum(align(dim, "minimal") == dim for _, _, dim in changed)
        return {"like": {"made_by": self.made_by, "dims": len(changed), "aligned": aligned}}


def read_other(like: str | Path, model: Checkpoint) -> OtherPlan:
    """Read the dims that another tool chose for a model.

    Args:
        like: A model that the tool wrote, as `vllm_gac.import_model` takes it; or a JSON file of
            ranks, {"model.layers.0.mlp.up_proj": 107, ...}.
        model: The dense model.

    Raises:
        CheckpointError: The files are broken, or name linear layers that the model does not have.
        PlanError: The tool changed what no method of ours changes, or nothing at all.
    """
    path, dense = Path(like), model.layout
    if path.suffix == ".json":
        other_plan = OtherPlan("ranks", dense, replace(dense, layers=_of_ranks(path, dense)))
    else:
        other = open_source(model_directory(like), model.directory)
        for fault in faults(other):
            raise CheckpointError(fault)
        made_by = other.format if isinstance(other, Imported) else "gac"
        _refuse_incomparable(path, other.layout, model)
        other_plan = OtherPlan(made_by, dense, replace(dense, layers=other.layout.layers))
    if other_plan.layout.layers == dense.layers:
        raise PlanError(f"{path}: has the dims of {model.directory}: nothing to plan again")
    return other_plan


def request_from_reference(request: PlanRequest, other: OtherPlan) -> PlanRequest:
    """The request for a plan that spends what `other` spends, by methods that change the same.

    Raises:
        PlanError: The request has budgets or methods of its own, or `other` spends more than the
            dense model has.
    """
    if not request.keeps_everything or request.methods != PlanRequest().methods:
        raise PlanError("budgets and methods are those of the other model; leave them out")
    dense, layers, dense_layer = other.dense, other.layout.layers, other.dense.layers[0]
    changed = {
        name: any(
            getattr(x, field) != getattr(dense_layer, field)
            for method in methods_of([name])
            for field in method.fields + method.replaces
            for x in layers
        )
        for name in METHODS
    }
    return replace(
        request,
        methods=tuple(method for method in METHODS if changed[method]),
        param_ratio=_ratio("parameters", other.layout.parameters, dense.parameters),
        kv_ratio=_ratio("numbers in the cache", other.layout.kv_elements, dense.kv_elements),
    )


def _ratio(what: str, used: int, dense_size: int) -> float:
    """The share of `dense_size` that is exactly `used` once it is rounded down."""
    if used > dense_size:
        raise PlanError(f"the other model has {used:,} {what}, the dense one {dense_size:,}")
    return ceil(Fraction(used * _RATIO_UNIT, dense_size)) / _RATIO_UNIT


def implied_losses(other: OtherPlan, methods: Sequence[str]) -> Losses:
    """The losses of other models, scaled so that the dims of `other` are the best for their cost.

    A curve's slope at the tool's dim, by the parameters of one more, is then the same in each part
    of each layer. The sum of all scales is that of the plain curves.
    """
    plain = prior_losses(other.dense, methods)
    scales = [
        dict(_scales(other.dense, layer, curves, methods))
        for layer, curves in zip(other.layout.layers, plain, strict=True)
    ]
    mean = sum(x for own in scales for x in own.values()) / sum(map(len, scales))
    return [
        {
            name: curve * own[name if name in own else component_of(name)] / mean
            for name, curve in curves.items()
        }
        for own, curves in zip(scales, plain, strict=True)
    ]


def _scales(
    dense: ModelLayout, layer: LayerLayout, curves: Mapping[str, Curve], methods: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """(part or curve, parameters of one number more by what they save) in a layer."""
    for method in methods_of(methods):
        for value in method.dim_values(dense, layer):
            slope = _slope(curves[value.curve], value.dim, value.full)
            yield from ((name, value.parameters / slope) for name in value.scales)


def _slope(curve: Curve, dim: float, full: float) -> float:
    """What one number more saves at `dim`, of at most `full`."""
    at = max(1, min(round(dim), int(_MAX_SHARE * Fraction(full))))
    return float(curve[at - 1] - curve[at + 1]) / 2


def _of_ranks(path: Path, dense: ModelLayout) -> tuple[LayerLayout, ...]:
    """The dense layers with the ranks in a JSON file, as far as they save parameters."""
    raw = read_json(path, CheckpointError)
    check_linears(raw, dense, str(path))
    ranks = validate(_Ranks, raw, str(path)).root
    layers = []
    for index, layer in enumerate(dense.layers):
        layer_ranks = {name: ranks.get(f"model.layers.{index}.{name}") for name in LINEARS}
        paying = {
            name: rank
            for name, rank in layer_ranks.items()
            if rank is not None and rank < breakeven_rank(dense, layer, name)
        }
        layers.append(replace(layer, ranks=MappingProxyType(paying)))
    return tuple(layers)


def _refuse_incomparable(path: Path, other: ModelLayout, model: Checkpoint) -> None:
    """Raise PlanError if a tool changed what no method of ours changes."""
    dense = model.layout
    differing = [
        (f"{what} {getattr(other, name)}", getattr(dense, name))
        for name, what in _SAME.items()
        if getattr(other, name) != getattr(dense, name)
    ]
    if len(other.layers) != len(dense.layers):
        differing.append((f"{len(other.layers)} layers", len(dense.layers)))
    for theirs, ours in differing:
        raise PlanError(
            f"{path}: has {theirs}, {model.directory} {ours}: no method changes that, so there is "
            "no plan near it"
        )
