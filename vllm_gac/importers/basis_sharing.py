"""Basis Sharing (Wang et al., ICLR 2025, arXiv:2410.03765): a down factor shared by some layers.

config.json is the dense model's, with architecture ShareLlamaForCausalLM or
ShareMistralForCausalLM (LowRankArena: model_type basis_sharing_llama); for each x of q, k, v, o,
gate, up and down it has `num_basis_x`, the rank, and `x_groups`, lists of the layers that share a
basis. `x_proj.weight` [out, rank] is a layer's own factor. The basis [rank, in] has as many names
as there are modules that refer to it: `model.x_basis.{layer}.weight` for each layer of the group,
and `model.layers.{layer}.self_attn.x_basis.weight` (mlp for gate, up and down). Files hold it under
one of them or under several.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.factorized import Factorized, FactorNames, import_factorized
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.layout.schema import Dim, validate

_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_Groups = Annotated[list[list[Annotated[int, Field(ge=0, lt=1024)]]], Field(default_factory=list)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_basis_q: Dim | None = None
    num_basis_k: Dim | None = None
    num_basis_v: Dim | None = None
    num_basis_o: Dim | None = None
    num_basis_gate: Dim | None = None
    num_basis_up: Dim | None = None
    num_basis_down: Dim | None = None
    q_groups: _Groups
    k_groups: _Groups
    v_groups: _Groups
    o_groups: _Groups
    gate_groups: _Groups
    up_groups: _Groups
    down_groups: _Groups


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote config.json."""
    return any(f"num_basis_{x}" in raw for x in _LINEARS)


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    base, dense = dense_of(raw, where, drop=tuple(_Config.model_fields))
    ranks: dict[str, int] = {}
    bases: dict[str, tuple[str, ...]] = {}
    for x, linear in _LINEARS.items():
        rank = getattr(config, f"num_basis_{x}")
        for group in getattr(config, f"{x}_groups"):
            stored = _basis_names(linear, group, tensors)
            for layer in group:
                name = f"model.layers.{layer}.{linear}"
                if rank is None:
                    raise CheckpointError(f"{where}: num_basis_{x}: missing, {x}_groups is there")
                if name in ranks or layer >= len(dense.layers):
                    why = "appears twice" if name in ranks else "is not a layer of the model"
                    raise CheckpointError(f"{where}: {x}_groups: {layer} {why}")
                ranks[name] = rank
                # One layer compares the copies, on behalf of all layers of the group.
                bases[name] = stored if layer == group[0] else stored[:1]
    names = FactorNames(
        lambda linear: bases[linear],
        lambda linear: f"{linear}.weight",
        lambda linear: f"{linear}.bias",
    )
    model = Factorized(base, dense, ranks, names)
    return import_factorized("basis-sharing", directory, model, tensors)


def _basis_names(
    linear: str, group: list[int], tensors: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """The names under which the files hold the basis of `linear` of the layers in `group`.

    If the files do not hold it, the one name that it should have.
    """
    module = linear.removesuffix("_proj")
    names = [f"model.layers.{layer}.{module}_basis.weight" for layer in group]
    names += [f"model.{module.rpartition('.')[2]}_basis.{layer}.weight" for layer in group]
    return tuple(name for name in names if name in tensors) or tuple(names[:1])
