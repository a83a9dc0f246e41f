"""The table of dtypes agrees with torch and safetensors."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_gac.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES, stored_dtype


def test_every_dtype_is_stored_under_its_name_and_in_its_size(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({"x": torch.zeros(8, dtype=dtype.torch)}, path)
        with safe_open(path, framework="np") as file:
            assert file.get_slice("x").get_dtype() == name == dtype.name
        assert dtype.torch.itemsize == dtype.bytes
        assert stored_dtype(dtype.torch) == dtype


def test_weight_dtypes_are_the_floats_of_two_and_four_bytes() -> None:
    assert {DTYPES[name].torch_name for name in WEIGHT_DTYPES} == set(WEIGHT_DTYPES.values())
    assert {DTYPES[name].bytes for name in WEIGHT_DTYPES} == {2, 4}


def test_a_dtype_that_is_not_stored_has_no_entry() -> None:
    assert stored_dtype(torch.complex64) is None
