"""From Python, too, a request is refused if the command line would refuse it."""

from typing import Any

import numpy as np
import pytest

from vllm_gac.errors import PlanError
from vllm_gac.planning.request import PlanRequest


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("param_ratio", 0, "param_ratio 0: expected a number above 0 and at most 1"),
        ("param_ratio", 1.01, "param_ratio 1.01: expected a number"),
        ("param_ratio", None, "param_ratio None: expected a number"),
        ("kv_ratio", float("nan"), "kv_ratio nan: expected a number"),
        ("kv_ratio", "0.5", "kv_ratio 0.5: expected a number"),
        ("methods", (), r"methods \(\): expected some of heads, prune, lowrank"),
        ("methods", "heads", "methods heads: expected some of heads, prune, lowrank"),
        ("methods", ("heads", "svd"), "expected some of heads, prune, lowrank"),
        ("align", "exact", "align exact: expected one of none, minimal"),
        ("key_group", 3, "key_group 3: expected one of 1, 2"),
        ("tensor_parallel_size", 0, "tensor_parallel_size 0: expected an integer of at least 1"),
        (
            "tensor_parallel_size",
            2.0,
            "tensor_parallel_size 2.0: expected an integer of at least 1",
        ),
        ("quantization", "int4", "quantization int4: expected one of fp8"),
        ("max_loss", 1, "max_loss 1: expected a share above 0 and below 1: 1 % is 0.01"),
        ("latency", float("inf"), "latency inf: expected a number above 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanRequest(**{field: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"latency": 5.0, "latency_ratio": 0.5}, "latency and latency_ratio: give one of them"),
        ({"max_loss": 0.01, "latency_ratio": 0.5}, "max_loss finds the fastest model"),
        ({"minimize": "bytes", "kv_ratio": 0.5}, "minimize bytes has no effect without max_loss"),
    ],
)
def test_what_contradicts_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanRequest(**given)


def test_all_methods_may_make_the_fastest_model() -> None:
    assert PlanRequest(max_loss=0.01).methods == ("heads", "prune", "lowrank")
    assert PlanRequest(max_loss=0.01, methods=["prune"]).methods == ["prune"]


def test_numbers_of_numpy_are_numbers() -> None:
    request = PlanRequest(param_ratio=float(np.float32(0.5)), decode_batch=np.int64(8))
    assert request.decode_batch == 8
