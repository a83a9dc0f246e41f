"""ASVD (Yuan et al., 2023, arXiv:2312.05821).

config.json is the dense model's, with `truncation_ranks` {linear: rank}. W = ALinear @ BLinear, and
ALinear has the bias. lm_head may be factorized, too. `auto_map` and the .py files in the directory
are ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.importers.factorized import Factorized, check_linears, import_factorized
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.layout.schema import Dim, ForeignModel, validate

_FACTORS = {"down": "BLinear.weight", "up": "ALinear.weight", "bias": "ALinear.bias"}


class _Config(ForeignModel):
    truncation_ranks: dict[str, Dim]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote config.json."""
    return "truncation_ranks" in raw


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    ranks = validate(_Config, dict(raw), where).truncation_ranks
    base, dense = dense_of(raw, where)
    check_linears(ranks, dense, f"{where}: truncation_ranks")
    return import_factorized("asvd", directory, Factorized(base, dense, ranks, _named), tensors)


def _named(linear: str, factor: str) -> str:
    return f"{linear}.{_FACTORS[factor]}"
