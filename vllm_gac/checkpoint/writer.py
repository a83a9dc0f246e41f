"""What a new model directory has beside its shards: auxiliary files and the index.

Every file is written atomically. runs/workspace.py makes the complete directory appear.
"""

import math
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.digests import sign_files, unsign_files
from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import version_of
from vllm_gac.checkpoint.locate import INDEX_FILE, auxiliary_files
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.untrusted_files import sha256_of_file
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError


def write_index(checkpoint: Checkpoint) -> None:
    """Check all of a finished model, and write the index of its shards and digests of its files."""
    unsign_files(checkpoint.directory)
    for fault in all_faults(checkpoint):
        raise CheckpointError(fault)
    tensors = checkpoint.tensors
    total = sum(math.prod(info.shape) * DTYPES[info.dtype].bytes for info in tensors.values())
    write_json(
        checkpoint.directory / INDEX_FILE,
        {
            "metadata": {"total_size": total},
            "weight_map": {name: tensors[name].file for name in sorted(tensors)},
        },
    )
    sign_files(checkpoint.directory)


def fingerprint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What identifies a model directory to a run that goes on, without reading all weights."""
    files = {info.file for info in checkpoint.tensors.values()}
    return {
        **checkpoint.identity,
        "beside": {
            path.name: sha256_of_file(path) for path in auxiliary_files(checkpoint.directory)
        },
        "files": {file: size_and_time(checkpoint.directory / file) for file in sorted(files)},
    }


def size_and_time(path: Path) -> list[int]:
    """The size and the time of the last change of a file, which tell whether it has changed."""
    return [*version_of(path.stat())]
