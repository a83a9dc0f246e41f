"""Tensors are read by position as safetensors reads them; NaN and infinity are found in them."""

import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.model_files import config, gac_config, refusal, write_model
from vllm_gac.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES, stored_dtype
from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.checkpoint.locate import locate_weights
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError, DiskError

TENSORS = {
    **{name: torch.randn(5, 7).to(dtype.torch) for name, dtype in DTYPES.items()},
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
    headers = read_headers(locate_weights(directory))
    with closing(ShardFiles(directory)) as files:
        for name, info in headers.items():
            tensor = files.tensor(name, info)
            assert tensor.dtype == expected[name].dtype
            raw, other = (x.reshape(-1).view(torch.uint8) for x in (tensor, expected[name]))
            assert torch.equal(raw, other), name
            tensor.zero_()  # the tensor has its own memory
    assert torch.equal(load_file(directory / "model.safetensors")["huge"], TENSORS["huge"])
    for name, dtype in DTYPES.items():
        assert headers[name].dtype == name
        assert stored_dtype(dtype.torch) == dtype
        assert dtype.torch.itemsize == dtype.bytes
    assert {DTYPES[name].torch_name for name in WEIGHT_DTYPES} == set(WEIGHT_DTYPES.values())
    assert stored_dtype(torch.complex64) is None


def test_part_of_a_tensor_can_be_read(directory: Path) -> None:
    info = read_headers(locate_weights(directory))["U8"]
    with closing(ShardFiles(directory)) as files:
        files.read_into(info, memoryview(part := bytearray(3)), offset=4)
    assert list(part) == TENSORS["U8"].flatten()[4:7].tolist()


def test_an_unknown_type_is_named(directory: Path) -> None:
    info = TensorInfo("model.safetensors", "F4", (2,), 0)
    with (
        closing(ShardFiles(directory)) as files,
        pytest.raises(CheckpointError, match=r"model\.safetensors: x: .*F4"),
    ):
        files.tensor("x", info)


# ---- values out of range ----------------------------------------------------------------------

MATRIX = "model.layers.0.mlp.down_proj.A.weight"
TABLE = "model.layers.0.self_attn.rope_inv_freq"
BAD = {
    "BF16": (struct.pack("<H", 0x7FC1), struct.pack("<H", 0xC780)),
    "F16": (struct.pack("<H", 0xFE00), struct.pack("<H", 0x7C00)),
    "F32": (struct.pack("<f", float("nan")), struct.pack("<f", 1e30)),
}


@pytest.mark.parametrize("dtype", BAD)
@pytest.mark.parametrize("name", [MATRIX, TABLE, "model.norm.weight", "lm_head.weight"])
def test_values_out_of_range_are_found(name: str, dtype: str, tmp_path: Path) -> None:
    for value in BAD["F32" if name == TABLE else dtype]:
        write_model(tmp_path, gac_config(), fill={name: bytes(len(value)) + value}, dtype=dtype)
        assert refusal(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: {name}: ")
        assert list(faults(open_checkpoint(tmp_path))) == []


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("BF16", struct.pack("<H", 0xC77F)),
        ("F16", struct.pack("<H", 0x7BFF)),
        ("F32", struct.pack("<f", -65535.9)),
        ("BF16", struct.pack("<H", 0x0001)),
        ("F32", struct.pack("<I", 0x007FFFFF)),
    ],
)
def test_large_numbers_and_denormals_are_accepted(dtype: str, value: bytes, tmp_path: Path) -> None:
    write_model(tmp_path, gac_config(), fill={MATRIX: value}, dtype=dtype)
    assert list(all_faults(open_checkpoint(tmp_path))) == []


# ---- files that change after their header was read --------------------------------------------


def replaced(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(shard.read_bytes() + bytes(64))
    other.replace(shard)


def rewritten(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    os.utime(shard, (1, 1))  # two writes may be at the same time


CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda shard: os.truncate(shard, 0),
    "one byte short": lambda shard: os.truncate(shard, shard.stat().st_size - 1),
    "replaced": replaced,
    "rewritten": rewritten,
    "a directory": lambda shard: (shard.unlink(), shard.mkdir()),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_changed_is_refused(case: str, tmp_path: Path) -> None:
    shard = write_model(tmp_path, config()) / "model.safetensors"
    with open_checkpoint(tmp_path).reader() as read:
        CHANGES[case](shard)
        with pytest.raises((CheckpointError, DiskError), match=r"model\.safetensors"):
            read("model.norm.weight")


@pytest.mark.parametrize("case", CHANGES)
def test_an_open_file_is_read_to_its_end_or_refused(case: str, tmp_path: Path) -> None:
    """With a memory-mapped file, SIGBUS would kill the process."""
    shard = write_model(tmp_path, config()) / "model.safetensors"
    with open_checkpoint(tmp_path).reader() as read:
        norm = read("model.norm.weight")
        CHANGES[case](shard)
        if case in ("removed", "replaced", "a directory"):
            assert torch.equal(read("model.norm.weight"), norm)
            return
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read("model.norm.weight")
