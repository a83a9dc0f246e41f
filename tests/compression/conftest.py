"""A small model in bf16 and a text, to calibrate it on."""

from pathlib import Path

import pytest
import torch

from tests.support.dense_models import config, write, write_text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", config(), torch.bfloat16)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")
