"""Convert a model that another tool wrote into a gac directory.

The output directory appears only when it is complete. Until then the work is in OUT.partial (see
runs/workspace.py). One layer is converted at a time, so that memory holds one layer, and a
run that was stopped continues with the next layer.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.dtypes import WEIGHT_DTYPES, WeightDtype
from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.locate import auxiliary_files, tokenized_by_mistral
from vllm_gac.checkpoint.open import faults
from vllm_gac.checkpoint.untrusted_files import sha256_of_file
from vllm_gac.checkpoint.writer import size_and_time
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Format, Imported
from vllm_gac.importers.open_any import open_source
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.steps.convert.request import ImportRequest
from vllm_gac.steps.model_card import imported_card
from vllm_gac.steps.model_run import Output
from vllm_gac.steps.rewritten import write_files
from vllm_gac.version import version


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an import has written; `tokenizer` says whether a tokenizer is part of it."""

    format: Format
    layout: ModelLayout
    dtype: str
    tokenizer: bool


def import_model(
    source: str | Path,
    out: str | Path,
    request: ImportRequest | None = None,
    *,
    revision: str | None = None,
    base: str | Path | None = None,
    base_revision: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Conversion:
    """Convert a model that another compression tool wrote into a gac directory.

    Args:
        source: A model directory, its id on the Hub, or a file with a state dict. Of the Hub,
            only safetensors are fetched.
        out: The directory to write; it appears only when it is complete.
        request: The dtype to store. None: that of the matrices.
        revision: A branch, tag or commit of a `source` on the Hub. None: main.
        base: Directory of the model before compression, or its id on the Hub. The tokenizer and the
            generation config are copied from there, and config.json if `source` is a file. None:
            from `source`.
        base_revision: A branch, tag or commit of a `base` on the Hub. None: main.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The format of `source`, the layout and dtype of what was written, and whether it has a
        tokenizer.

    Raises:
        CheckpointError: `source` is broken, or needs no conversion.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> import vllm_gac
        >>> done = vllm_gac.import_model("svd-llm", "imported")
        >>> done.format, done.dtype
        ('svd-llm', 'float32')
        >>> done.layout.layers[0].ranks["self_attn.q_proj"]
        3
    """
    request, source = request or ImportRequest(), model_directory(source, revision)
    if base is not None:
        base = model_directory(base, base_revision, weights=False, flag="--base-revision")
    inputs = [source] if base is None else [source, base]
    output = Output(Path(out), "import", inputs, resume)
    output.check()
    model = open_source(source, base)
    if not isinstance(model, Imported):
        for fault in faults(model):
            raise CheckpointError(fault)
        what = "compressed already" if model.config.gac else "a dense model"
        raise CheckpointError(f"{source}: {what}: nothing to convert")
    for fault in faults(model):
        raise CheckpointError(fault)
    beside = base or model.directory
    # These refuse what cannot be copied before the work begins.
    refuse_unserved(beside)
    auxiliary_files(beside)
    tokenized_by_mistral(beside)
    # What is said of the model before is read where it is: its id, its card and its licence.
    dense = model.config.model_copy(update={"gac": None})
    origin = model if base is None else replace(model, directory=base, config=dense)
    stored = request.dtype or _widest(model)
    with output.run(_record(model, beside, base, stored)) as run:
        if not run.finished:
            _write_shards(model, stored, run.model, progress)
            card = imported_card(origin, model.format, _files(model), stored)
            write_files(beside, run.model, _config(origin, stored), card)
        return Conversion(model.format, model.layout, stored, _has_tokenizer(run.model))


def _record(model: Imported, beside: Path, base: Path | None, dtype: WeightDtype) -> dict[str, Any]:
    """What tells a run that goes on whether files and options are still the same."""
    return {
        "format": model.format,
        "dtype": dtype,
        "files": {str(path): size_and_time(path) for path in _files(model)},
        "config_sha256": hashlib.sha256(json.dumps(model.raw_config).encode()).hexdigest(),
        "base": str(base) if base else None,
        "beside": {
            str(path.relative_to(beside)): sha256_of_file(path) for path in auxiliary_files(beside)
        },
    }


def _widest(model: Imported) -> WeightDtype:
    """The dtype of every matrix of `model`; float32 if they differ."""
    dtypes = {model.tensors[name].dtype for name, shape in model.required().items() if shape[1:]}
    kinds = {WEIGHT_DTYPES[name] for name in dtypes if name in WEIGHT_DTYPES}
    return kinds.pop() if len(kinds) == 1 else "float32"


def _files(model: Imported) -> list[Path]:
    """The files that hold the model's tensors."""
    return [model.directory / file for file in sorted({i.file for i in model.tensors.values()})]


def _write_shards(model: Imported, dtype: WeightDtype, directory: Path, progress: bool) -> None:
    with model.reader() as read, torch.inference_mode():

        def read_cast(name: str) -> torch.Tensor:
            return _cast(model, name, read(name), dtype)

        write_layer_shards(
            directory,
            model.layout,
            lambda index: read_layer(model.layout, read_cast, index),
            read_cast,
            description="import",
            progress=progress,
        )


def _cast(model: Imported, name: str, tensor: torch.Tensor, dtype: WeightDtype) -> torch.Tensor:
    """`tensor` in the dtype in which it is stored.

    RoPE tables are always fp32; norms and biases stay fp32 if they were. Raises CheckpointError
    if the result has NaN or infinity: what is stored has neither.
    """
    exact = name.endswith(".rope_inv_freq") or (tensor.ndim == 1 and tensor.dtype == torch.float32)
    stored = tensor.to(torch.float32 if exact else getattr(torch, dtype)).contiguous()
    if not stored.isfinite().all():
        originals = model.sources[name].names
        where = f"{model.directory / model.tensors[originals[0]].file}: {' and '.join(originals)}"
        raise CheckpointError(f"{where}: too large for {dtype}; give another --dtype")
    return stored


def _config(model: Imported, dtype: WeightDtype) -> dict[str, Any]:
    kept = {key: value for key, value in model.raw_config.items() if key != "torch_dtype"}
    tool = {"tool": f"vllm-gac {version()}"}
    source = kept["gac"]["source"] | tool | base_model(model).recorded()
    return kept | {"dtype": dtype, "gac": kept["gac"] | {"source": source}}


def _has_tokenizer(directory: Path) -> bool:
    return any(directory.glob("tokenizer.*")) or (directory / "tekken.json").exists()
