"""SVD-LLM (Wang et al., ICLR 2025, arXiv:2403.07378), as a state dict of its modules.

config.json is the dense model's. Every linear of a layer is two, `self_attn.q_u_proj.weight`
[out, rank] and `self_attn.q_v_proj.weight` [rank, in]; the same for k, v, o, gate, up and down.
(`v_u_proj` belongs to V, and `k_v_proj` is the down factor of K.) Ranks are read from the shapes,
because the config has none and the modules' attributes are wrong for grouped queries. The factors
are fp32, norms and embeddings fp16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.factorized import Factorized, import_factorized, linear_names
from vllm_gac.importers.imported import Imported, dense_of

_FACTORS = {"down": "v_proj.weight", "up": "u_proj.weight", "bias": "u_proj.bias"}


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote the directory, by the names of the tensors."""
    return any(name.endswith("_v_proj.weight") for name in names)


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the tensor that is wrong."""
    base, dense = dense_of(raw, str(directory / "config.json"))
    ranks: dict[str, int] = {}
    for linear in linear_names(dense):
        for factor, axis in ((_named(linear, "down"), 0), (_named(linear, "up"), 1)):
            if (info := tensors.get(factor)) is None:
                continue  # if only one of the two is there, `faults` names the other
            if len(info.shape) != 2 or min(info.shape) < 1:
                raise CheckpointError(
                    f"{directory / info.file}: {factor}: shape {list(info.shape)}, expected a "
                    "matrix whose rank is at least 1"
                )
            ranks.setdefault(linear, info.shape[axis])
    model = Factorized(base, dense, ranks, _named)
    return import_factorized("svd-llm", directory, model, tensors, mixed_dtypes=True)


def _named(linear: str, factor: str) -> str:
    """The factors are siblings of the linear that they replace."""
    return f"{linear.removesuffix('_proj')}_{_FACTORS[factor]}"
