"""What a stopped run has kept is read as it was written, or refused in a sentence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from vllm_gac.compression.passes import kept_tensors
from vllm_gac.errors import CheckpointError

HIDDEN = torch.arange(24.0).view(2, 3, 4)
WHOLE = save({"hidden": HIDDEN})


@pytest.mark.parametrize(
    "contents", [None, b"", WHOLE[:-4], save({"x": HIDDEN}), save({"hidden": HIDDEN[:1]})]
)
def test_anything_else_is_refused_by_its_name(contents: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "hidden-0001.safetensors"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"hidden-0001\.safetensors"):
        kept_tensors(path, {"hidden": (2, 3, 4)})
