"""Every reason why a model directory should not be served."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.open import faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.shown import sentence


@dataclass(frozen=True, slots=True)
class Verification:
    """The faults found, one sentence each; numbers of tensors and parameters, 0 if unreadable."""

    ok: bool
    faults: list[str]
    tensors: int
    parameters: int

    def as_json(self) -> dict[str, Any]:
        """This, as JSON values."""
        return asdict(self)


def verify(directory: Path, progress: bool = False) -> Verification:
    """Check headers against the layout and every value for being finite.

    A directory that cannot be read at all is one fault. `progress` shows a bar if it takes long.
    Raises OSError if the disk fails.
    """
    try:
        _, checkpoint = open_any_format(directory)
        found = [sentence(fault) for fault in faults(checkpoint, finite=True, progress=progress)]
    except CheckpointError as e:
        return Verification(False, [str(e)], 0, 0)
    return Verification(not found, found, len(checkpoint.tensors), checkpoint.layout.parameters)
