"""The line about a model that is served in other types than it was planned for."""

import re
from dataclasses import asdict, replace
from types import MappingProxyType

import pytest

from tests.gpu.test_latency import DENSE, LAYER
from vllm_gac.gpu.profile import Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS, ModelLayout
from vllm_gac.serving.planned_types import dtype_mismatch_warning, planned_types

FP8 = Types("fp8", "fp8")
H200 = read_profile("h200")


def low_rank() -> ModelLayout:
    ranks = {name: int(0.4 * min(DENSE.linear_shape(LAYER, name))) for name in LINEARS}
    ranks = {name: rank // 16 * 16 for name, rank in ranks.items()}
    return replace(DENSE, layers=(replace(LAYER, ranks=MappingProxyType(ranks)),))


def test_a_model_in_the_types_of_its_plan_gets_no_line() -> None:
    for types in (Types(), FP8):
        assert dtype_mismatch_warning(types, types, low_rank(), DENSE, H200, True) is None
        assert planned_types({"planned_for": asdict(types)}) == types


@pytest.mark.parametrize(
    "said", [None, "fp8", [], {"weights": ["fp8"]}, {"weights": "fp8", "cache": "int2"}]
)
def test_types_that_nobody_knows_get_no_line(said: object) -> None:
    assert planned_types({"planned_for": said}) is None
    assert planned_types({}) is None


def test_a_profile_without_times_gives_no_numbers() -> None:
    lacks = H200.model_copy(update={"decode": []})
    said = dtype_mismatch_warning(Types(), FP8, low_rank(), DENSE, lacks, True)
    assert said is not None
    assert "predicted" not in said


def test_low_rank_that_was_planned_in_16_bits_is_said_to_be_slower_in_fp8() -> None:
    said = dtype_mismatch_warning(Types(), FP8, low_rank(), DENSE, H200, True)
    assert said is not None
    assert "16-bit" in said
    assert "FP8" in said
    served, planned = (
        float(t.split()[0].rstrip(";")) for t in re.split(r"to take |types give ", said)[1:]
    )
    assert served > planned


def test_multiplying_factors_out_is_recommended_where_it_is_faster_and_possible() -> None:
    faster = re.search(
        r"to take (\S+) times .*, or serve with .*merge_factors.*: (\S+) times, \+8% parameters$",
        str(dtype_mismatch_warning(Types(), FP8, low_rank(), DENSE, H200, True)),
    )
    assert faster is not None
    assert float(faster[2]) < float(faster[1])
    only_cache = Types("bf16", "fp8")  # where low rank is as fast as it was planned to be
    for types, layout, mergeable in (
        (FP8, low_rank(), False),
        (FP8, DENSE, True),
        (only_cache, low_rank(), True),
    ):
        said = dtype_mismatch_warning(Types(), types, layout, DENSE, H200, mergeable)
        assert said is not None
        assert "merge_factors" not in said
    unknown = [
        dtype_mismatch_warning(Types(), t, low_rank(), DENSE, None, True) for t in (FP8, only_cache)
    ]
    assert ["merge_factors" in str(said) for said in unknown] == [True, False]


def test_without_times_of_the_gpu_there_are_no_numbers() -> None:
    said = dtype_mismatch_warning(FP8, Types(), DENSE, DENSE, None, True)
    assert said is not None
    assert said.endswith("plan with the --quantization and --kv-cache-dtype that serve")
    assert "predicted" not in said
