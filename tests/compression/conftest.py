"""A small model in bf16, to calibrate it."""

from pathlib import Path

import pytest
import torch

from tests.support.dense_models import config, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", config(), torch.bfloat16)
