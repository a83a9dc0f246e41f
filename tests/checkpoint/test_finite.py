"""NaN and infinity are found at every position, and no other value is mistaken for them."""

import os
import struct
from pathlib import Path

import pytest

from tests.support.model_files import config, gac_config, refusal, write_model
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.errors import CheckpointError

MATRIX = "model.layers.0.mlp.down_proj.A.weight"
TABLE = "model.layers.0.self_attn.rope_inv_freq"
UP = "model.layers.1.self_attn.k_up_proj.weight"

NAN, INFINITY = {}, {}
for _dtype, _nan, _infinity in (("BF16", 0x7FC1, 0xFF80), ("F16", 0xFE00, 0x7C00)):
    NAN[_dtype], INFINITY[_dtype] = struct.pack("<H", _nan), struct.pack("<H", _infinity)
NAN["F32"], INFINITY["F32"] = struct.pack("<f", float("nan")), struct.pack("<f", float("-inf"))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bad", [NAN, INFINITY], ids=["NaN", "infinity"])
@pytest.mark.parametrize("name", [MATRIX, UP, TABLE, "model.norm.weight", "lm_head.weight"])
def test_nan_and_infinity_are_found(
    name: str, bad: dict[str, bytes], dtype: str, tmp_path: Path
) -> None:
    value = bad["F32" if name == TABLE else dtype]
    write_model(tmp_path, gac_config(), fill={name: bytes(len(value)) + value}, dtype=dtype)
    assert (
        refusal(tmp_path) == f"{tmp_path / 'model.safetensors'}: {name}: contains NaN or infinity"
    )
    assert list(faults(open_checkpoint(tmp_path))) == []


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("BF16", struct.pack("<H", 0x7F7F)),
        ("F16", struct.pack("<H", 0x7BFF)),
        ("F32", struct.pack("<f", -3.4e38)),
        ("BF16", struct.pack("<H", 0x0001)),
        ("F32", struct.pack("<I", 0x007FFFFF)),
    ],
)
def test_the_largest_numbers_and_denormals_are_finite(
    dtype: str, value: bytes, tmp_path: Path
) -> None:
    write_model(tmp_path, gac_config(), fill={MATRIX: value}, dtype=dtype)
    assert list(faults(open_checkpoint(tmp_path), finite=True)) == []


def test_a_shard_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, config()) / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has changed since"):
        list(faults(checkpoint, finite=True))
