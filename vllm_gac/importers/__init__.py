"""Models that other tools wrote, one module a format: layout and tensors read from their files."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.importers import (
    asvd,
    basis_sharing,
    block_configs,
    layer_lists,
    lems,
    palu,
    per_layer_config,
    svd_llm_export,
)
from vllm_gac.importers.imported import Imported

# From a directory, its parsed config.json and its tensors' headers.
Importer: TypeAlias = Callable[[Path, Mapping[str, Any], Mapping[str, TensorInfo]], Imported]

# Asked in this order; of two spellings in one config the newer one, which comes first, rules.
_FORMATS = (
    palu,
    basis_sharing,
    lems,
    svd_llm_export,
    asvd,
    per_layer_config,
    block_configs,
    layer_lists,
)


def recognize(raw: Mapping[str, Any], names: Iterable[str] = ()) -> Importer | None:
    """The importer of the tool that wrote a directory with config.json `raw`, None for no tool.

    One spelling shows in the tensors' `names` alone.
    """
    known = frozenset(names)
    return next((module.read for module in _FORMATS if module.wrote(raw, known)), None)
