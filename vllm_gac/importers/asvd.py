"""ASVD (Yuan et al., 2023, arXiv:2312.05821), and LowRankArena's exports with the same names.

config.json is the dense model's, with `truncation_ranks` {linear: rank}; LowRankArena writes
`low_rank_modules` {linear: {"rank": rank}}. W = ALinear @ BLinear, and ALinear has the bias.
lm_head may be factorized, too. `auto_map` and the .py files in the directory are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.importers.factorized import Factorized, check_linears, import_factorized, suffixed
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.layout.schema import Dim, ForeignModel, validate

_NAMES = suffixed("BLinear.weight", "ALinear.weight", "ALinear.bias")


class _Rank(ForeignModel):
    rank: Dim


class _Config(ForeignModel):
    truncation_ranks: dict[str, Dim] = Field(default_factory=dict)
    low_rank_modules: dict[str, _Rank] = Field(default_factory=dict)


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether one of these tools wrote config.json."""
    return "truncation_ranks" in raw or "low_rank_modules" in raw


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    key = "truncation_ranks" if "truncation_ranks" in raw else "low_rank_modules"
    ranks = config.truncation_ranks or {n: s.rank for n, s in config.low_rank_modules.items()}
    base, dense = dense_of(raw, where, drop=("truncation_ranks", "low_rank_modules"))
    check_linears(ranks, dense, f"{where}: {key}")
    return import_factorized(
        "asvd" if key == "truncation_ranks" else "low-rank",
        directory,
        Factorized(base, dense, ranks, _NAMES),
        tensors,
    )
