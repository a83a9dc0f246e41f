"""SVD-LLM (Wang et al., ICLR 2025, arXiv:2403.07378) as safetensors; its pickles: `svd_llm.py`.

There are two spellings. LowRankArena's export has model_type svdllm-llama, `svd_ranks`
{linear: rank} in config.json, `q_proj.u_proj.weight` [out, rank] and `q_proj.v_proj.weight`
[rank, in]. A state dict of SVD-LLM's own modules has a plain Llama config, and
`self_attn.q_u_proj.weight` and `self_attn.q_v_proj.weight`; the same for k, v, o, gate, up and
down. (`v_u_proj` belongs to V, and `k_v_proj` is the down factor of K.) Its ranks are read from the
shapes, because the config has none and the modules' attributes are wrong for grouped queries.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.factorized import (
    Factorized,
    FactorNames,
    check_linears,
    import_factorized,
    linear_names,
    suffixed,
)
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.layout.schema import Dim, validate

_NESTED = suffixed("v_proj.weight", "u_proj.weight", "u_proj.bias")


def _sibling(linear: str, factor: str) -> str:
    return f"{linear.removesuffix('_proj')}_{factor}"


# SVD-LLM's own names: the factors are siblings of the linear they replace.
FLAT = FactorNames(
    lambda linear: (_sibling(linear, "v_proj.weight"),),
    lambda linear: _sibling(linear, "u_proj.weight"),
    lambda linear: _sibling(linear, "u_proj.bias"),
)


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    svd_ranks: dict[str, Dim]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote the directory, by config.json or by the names of the tensors."""
    return "svd_ranks" in raw or any(name.endswith("_v_proj.weight") for name in names)


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    base, dense = dense_of(raw, where, drop=("svd_ranks",))
    if "svd_ranks" in raw:
        ranks, names = validate(_Config, dict(raw), where).svd_ranks, _NESTED
        check_linears(ranks, dense, f"{where}: svd_ranks")
    else:
        ranks, names = ranks_of(directory, linear_names(dense), FLAT, tensors), FLAT
    model = Factorized(base, dense, ranks, names)
    return import_factorized("svd-llm", directory, model, tensors, mixed_dtypes=True)


def ranks_of(
    directory: Path, linears: Iterable[str], names: FactorNames, tensors: Mapping[str, TensorInfo]
) -> dict[str, int]:
    """The rank of each linear that has factors, from the shape of its down or up factor.

    Raises CheckpointError naming a factor that is not a matrix.
    """
    ranks: dict[str, int] = {}
    for linear in linears:
        (down,) = names.down(linear)
        for factor, axis in ((down, 0), (names.up(linear), 1)):
            info = tensors.get(factor)
            if info is None:
                continue
            if len(info.shape) != 2 or min(info.shape) < 1:
                raise CheckpointError(
                    f"{directory / info.file}: {factor}: shape {list(info.shape)}, expected a "
                    "matrix whose rank is at least 1"
                )
            ranks.setdefault(linear, info.shape[axis])
    return ranks
