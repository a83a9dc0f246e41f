"""Importers: one module for each format in which another tool writes compressed models."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.importers import asvd, block_configs, per_layer_config, svd_llm
from vllm_gac.importers.imported import Imported

# From a directory, its parsed config.json and its tensors' headers.
Importer: TypeAlias = Callable[[Path, Mapping[str, Any], Mapping[str, TensorInfo]], Imported]

# In the order in which they are asked. If a config has two spellings of the same thing, the newer
# spelling comes first here and is used.
_FORMATS = (svd_llm, asvd, per_layer_config, block_configs)


def recognize(raw: Mapping[str, Any], names: Iterable[str] = ()) -> Importer | None:
    """The importer for a directory with config.json `raw`; None if no known tool wrote it.

    One format can be told only by the `names` of its tensors. A gac model is ours, whatever keys
    of other tools its dense model had.
    """
    if raw.get("gac") is not None:
        return None
    known = frozenset(names)
    return next((module.read for module in _FORMATS if module.wrote(raw, known)), None)
