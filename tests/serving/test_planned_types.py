"""The warning about a model that is served in other types than it was planned for."""

import re
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

import pytest

from tests.gpu.test_latency import DENSE, LAYER
from vllm_gac.gpu.profile import Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS
from vllm_gac.serving.planned_types import dtype_mismatch_warning, planned_types

BF16, FP8 = Types(), Types("fp8", "fp8")
FP8_CACHE = Types("bf16", "fp8")  # where low rank is as fast as it was planned to be
H200 = read_profile("h200")
RANKS = {name: int(0.4 * min(DENSE.linear_shape(LAYER, name))) // 16 * 16 for name in LINEARS}
LOW_RANK = replace(DENSE, layers=(replace(LAYER, ranks=MappingProxyType(RANKS)),))


@pytest.mark.parametrize(
    ("planned", "types"),
    [
        *((asdict(types), types) for types in (BF16, FP8)),
        *((malformed, None) for malformed in (None, "fp8", [], {"weights": ["fp8"]})),
        ({"weights": "fp8", "cache": "int2"}, None),
    ],
)
def test_the_types_of_a_plan_are_read_if_they_are_known(planned: Any, types: Types | None) -> None:
    assert planned_types({"planned_for": planned}) == types


def test_low_rank_that_was_planned_in_16_bits_is_slower_in_fp8_and_may_be_merged() -> None:
    assert dtype_mismatch_warning(FP8, FP8, LOW_RANK, DENSE, H200, True) is None
    warning = str(dtype_mismatch_warning(BF16, FP8, LOW_RANK, DENSE, H200, True))
    times = re.search(
        r"16-bit.* FP8 .*to take (\S+) times.* types give (\S+);.*"
        r"merge_factors.*: (\S+) times, \+8% parameters$",
        warning,
    )
    assert times is not None
    served, planned, merged = map(float, times.groups())
    assert planned < served
    assert merged < served


@pytest.mark.parametrize(
    ("profile", "served", "layout", "mergeable", "recommended"),
    [
        (H200, FP8, LOW_RANK, False, False),
        (H200, FP8, DENSE, True, False),
        (H200, FP8_CACHE, LOW_RANK, True, False),
        (None, FP8, LOW_RANK, True, True),
        (None, FP8_CACHE, LOW_RANK, True, False),
        (H200.model_copy(update={"decode": []}), FP8, LOW_RANK, True, True),
    ],
)
def test_merging_is_recommended_where_possible_and_times_are_said_if_known(
    profile: Any, served: Types, layout: Any, mergeable: bool, recommended: bool
) -> None:
    warning = dtype_mismatch_warning(BF16, served, layout, DENSE, profile, mergeable)
    assert warning is not None
    assert ("merge_factors" in warning) == recommended
    assert ("predicted" in warning) == (profile is H200)
