"""LEMS: a wrapper model around a dense one whose linear layers were factorized.

config.json holds the dense model's under `base_config`, and `rank_dict` {linear: rank}; every
tensor's name begins with `wrapped_model.`; W = mod_b @ mod_a, the bias is the linear's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.importers.factorized import Factorized, check_linears, import_factorized, suffixed
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.layout.schema import Dim, validate

MODEL_TYPE = "low_rank_compressed"
_NAMES = suffixed("mod_a.weight", "mod_b.weight", "bias")


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    base_config: dict[str, Any]
    base_model_type: str
    rank_dict: dict[str, Dim]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote config.json."""
    return raw.get("model_type") == MODEL_TYPE


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    own = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
    base, dense = dense_of(
        {**config.base_config, **own, "model_type": config.base_model_type},
        f"{where}: base_config",
    )
    check_linears(config.rank_dict, dense, f"{where}: rank_dict")
    model = Factorized(base, dense, config.rank_dict, _NAMES, prefix="wrapped_model.")
    return import_factorized("lems", directory, model, tensors)
