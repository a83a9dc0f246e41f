"""Linear layers that are stored as two factors under a tool's own names, as most low-rank tools do.

W [out, in] = up [out, rank] @ down [rank, in]. A linear is served as its factors if they hold fewer
elements than W, and as W otherwise. lm_head is always served as W.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.importers.imported import Format, Imported, Source, imported
from vllm_gac.layout.dims import LINEARS, ModelLayout

if TYPE_CHECKING:
    from torch import Tensor

LM_HEAD = "lm_head"
# What a tool calls the "down" or "up" factor of a linear, or its "bias".
FactorName: TypeAlias = Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Factorized:
    """A model some of whose linear layers were factorized.

    Attributes:
        config: config.json of the model before.
        dense: Layout of the model before.
        ranks: Ranks by the linear's full name, e.g. `model.layers.0.mlp.up_proj` or `lm_head`.
        named: How the tool names the factors.
    """

    config: Mapping[str, Any]
    dense: ModelLayout
    ranks: Mapping[str, int]
    named: FactorName


def linear_names(layout: ModelLayout) -> list[str]:
    """Full names of the linear layers of a model, lm_head last."""
    layers = range(len(layout.layers))
    return [*(f"model.layers.{i}.{name}" for i in layers for name in LINEARS), LM_HEAD]


def check_linears(ranks: Mapping[str, Any], layout: ModelLayout, where: str) -> None:
    """Raise CheckpointError naming `where` and the first key that is not a linear of the model."""
    known = frozenset(linear_names(layout))
    for name in ranks:
        if name not in known:
            raise CheckpointError(f"{where}: {sanitize(name)}: the model has no such linear")


def import_factorized(
    format: Format,
    directory: Path,
    model: Factorized,
    tensors: Mapping[str, TensorInfo],
    **options: Any,
) -> Imported:
    """The `Imported` of a factorized model. `options` are further fields of `Imported`.

    If lm_head is factorized, it is no longer tied to the embedding.
    """
    dense, ranks = model.dense, model.ranks
    tied = dense.tie_word_embeddings and LM_HEAD not in ranks
    layers = tuple(
        replace(layer, ranks=MappingProxyType(_served_ranks(model, index)))
        for index, layer in enumerate(dense.layers)
    )
    layout = replace(dense, layers=layers, tie_word_embeddings=tied)
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in replace(dense, tie_word_embeddings=tied).tensors().items():
        expected.update(_stored(model, name, shape))
    return imported(
        format,
        directory,
        model.config,
        layout,
        sources={name: _source(model, name) for name in layout.tensors()},
        expected=expected,
        tensors=tensors,
        **options,
    )


def _served_ranks(model: Factorized, index: int) -> dict[str, int]:
    """The ranks of those linear layers of a layer whose factors are smaller than the linear."""
    served = {}
    for name in LINEARS:
        rank = model.ranks.get(f"model.layers.{index}.{name}")
        out_size, in_size = model.dense.linear_shape(model.dense.layers[index], name)
        if rank is not None and rank * (out_size + in_size) < out_size * in_size:
            served[name] = rank
    return served


def _stored(model: Factorized, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the files hold for tensor `name` of the dense model."""
    linear, _, kind = name.rpartition(".")
    if linear not in model.ranks:
        return {name: shape}
    if kind == "bias":
        return {model.named(linear, "bias"): shape}
    rank = model.ranks[linear]
    down, up = (rank, shape[1]), (shape[0], rank)
    return {model.named(linear, "down"): down, model.named(linear, "up"): up}


def _source(model: Factorized, name: str) -> Source:
    """How tensor `name` of the served layout is made."""
    linear, _, kind = name.rpartition(".")
    factor = ""
    if linear.endswith((".A", ".B")):
        linear, _, factor = linear.rpartition(".")
    if linear not in model.ranks:
        return Source((name,))
    if kind == "bias":
        return Source((model.named(linear, "bias"),))
    down, up = (model.named(linear, factor) for factor in ("down", "up"))
    match factor:
        case "A":
            return Source((down,))
        case "B":
            return Source((up,))
    return Source((up, down), _product)


def _product(up: "Tensor", down: "Tensor") -> "Tensor":
    """The full linear: up [out, rank] @ down [rank, in] in fp32, rounded to the dtype of `up`."""
    return (up.float() @ down.float()).to(up.dtype)
