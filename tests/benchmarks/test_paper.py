"""The paper's arithmetic is repeated right, and its page can be written of any GPU's numbers."""

import json
from importlib import metadata

import pytest
import torch

from benchmarks.common.page import origin, provenance
from benchmarks.paper import reported_numbers as paper
from benchmarks.paper.__main__ import DIMS, SMALL_K, gain, overhead, page
from benchmarks.paper.runtime_padding import CASES, as_it_is, padded
from vllm_gac.layout.schema import Strategy


@pytest.mark.parametrize(
    ("strategy", "percent", "column"), [("minimal", 3.72, 1), ("optimal", 7.20, 2)]
)
def test_memory_and_gain_of_palus_heads_are_the_papers(
    strategy: Strategy, percent: float, column: int
) -> None:
    memory = overhead(paper.PALU_HEADS, strategy)
    before, after = ({dim: ms[i] for dim, ms in paper.REPAIR.items()} for i in (0, column))
    assert round(100 * memory, 2) == percent
    assert round(gain(before, after) / memory, 1) == paper.ROI[strategy]


def test_the_page_has_the_numbers_of_both_gpus() -> None:
    slow = {dim: 2.0 if dim % 8 else 1.0 for dim in DIMS}
    refused = [dim for dim in SMALL_K if dim % 8]
    attention = {
        name: {d: slow[d] for d in dims if name != "MEM_EFFICIENT" or d not in refused}
        for name, dims in paper.BACKENDS.items()
    }
    result = {
        "machine": "A GPU", "date": "today", "command": "c",
        "attention": attention | {"AUTO": slow},
        "refused": {"FLASH": [], "MEM_EFFICIENT": refused, "MATH": []},
        "products": {side: dict.fromkeys(SMALL_K, 1.0) for side in (4096, 8192)},
    }  # fmt: skip
    lines = page(json.loads(json.dumps(result))).splitlines()
    assert "| of the paper | case | A100 | A GPU |" in lines
    assert "| figure 3 | head size 107, ms | 2.147 | 2.000 |" in lines
    assert "| table 1 | MEM_EFFICIENT, head size 107, ms | refused | refused |" in lines
    assert "| table 2 | MEM_EFFICIENT takes others | 0% | 0% |" in lines
    assert "| table 5 | 107 padded to 112, speedup | 1.44x | 2.00x |" in lines
    assert "| table 6 | (4096, 4096, 112), ms | 0.05 | 1.0000 |" in lines
    assert "| tables 8, 9 | minimal, head size 107 to 112, gain | +27.8% | +50.0% |" in lines


def test_a_page_names_the_compiler_of_its_kernels() -> None:
    about = provenance("python -m x", "cpu", "abc")
    assert origin(about).endswith(f"triton {metadata.version('triton')}, commit abc, `python -m x`")


@pytest.mark.parametrize("name", CASES)
def test_padding_in_each_call_changes_no_result(name: str) -> None:
    layer, _, inputs = CASES[name]
    shapes = [(3, 42), *[(13, 42)] * inputs, (42, 13)]
    weights = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    torch.testing.assert_close(layer(weights, padded), layer(weights, as_it_is))
