"""What a stopped run has kept is read as it was written, or refused in a sentence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from vllm_gac.errors import CheckpointError
from vllm_gac.runs.kept_tensors import kept_tensors

HIDDEN = torch.arange(24.0).view(2, 3, 4)
WHOLE = save({"hidden": HIDDEN})


def test_what_was_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hidden-0001.safetensors"
    path.write_bytes(WHOLE)
    assert torch.equal(kept_tensors(path, {"hidden": (2, 3, 4)})["hidden"], HIDDEN)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, r"hidden-0001\.safetensors: .*No such file"),
        (b"", "not what the stopped run kept; remove it and resume"),
        (WHOLE[:-4], "not what the stopped run kept; remove it and resume"),
        (save({"x": HIDDEN}), r"has \{'x': \[2, 3, 4\]\}, expected \{'hidden': \[2, 3, 4\]\}"),
        (save({"hidden": HIDDEN[:1]}), r"has \{'hidden': \[1, 3, 4\]\}, expected"),
    ],
)
def test_anything_else_is_refused(contents: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hidden-0001.safetensors"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=said):
        kept_tensors(path, {"hidden": (2, 3, 4)})
