"""Tensors are read by position as safetensors reads them: all dtypes, large and empty ones."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.checkpoint.locate import locate_weights
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.errors import CheckpointError

TENSORS = {
    "bf16": torch.randn(5, 7).bfloat16(),
    "f16": torch.randn(3).half(),
    "f32": torch.randn(2, 3, 4),
    "f64": torch.randn(2).double(),
    "f8": torch.randn(9).to(torch.float8_e4m3fn),
    "i8": torch.arange(-5, 5, dtype=torch.int8),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "huge": torch.randn(1100, 1000).bfloat16(),  # more than a huge page
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_tensors_are_what_safetensors_reads(directory: Path) -> None:
    expected = load_file(directory / "model.safetensors")
    with closing(ShardFiles(directory)) as files:
        for name, info in read_headers(locate_weights(directory)).items():
            found = files.tensor(name, info)
            assert found.dtype == expected[name].dtype
            assert torch.equal(
                found.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)
            ), name
            found.zero_()  # the tensor has its own memory
    assert torch.equal(load_file(directory / "model.safetensors")["huge"], TENSORS["huge"])


def test_part_of_a_tensor_can_be_read(directory: Path) -> None:
    info = read_headers(locate_weights(directory))["i8"]
    with closing(ShardFiles(directory)) as files:
        files.read_into(info, memoryview(part := bytearray(3)), offset=4)
    assert list(part) == [255, 0, 1]


def test_an_unknown_type_is_named(directory: Path) -> None:
    info = TensorInfo("model.safetensors", "F4", (2,), 0)
    with (
        closing(ShardFiles(directory)) as files,
        pytest.raises(CheckpointError, match=r"model\.safetensors: x: dtype F4 cannot be read"),
    ):
        files.tensor("x", info)
