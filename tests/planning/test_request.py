"""From Python, too, a request is refused if the command line would refuse it."""

from typing import Any

import numpy as np
import pytest

from vllm_gac.errors import PlanError
from vllm_gac.planning.request import PlanRequest


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("param_ratio", 0, "--param-ratio 0"),
        ("param_ratio", 1.01, "--param-ratio 1.01"),
        ("param_ratio", None, "--param-ratio None"),
        ("kv_ratio", float("nan"), "--kv-ratio nan"),
        ("kv_ratio", "0.5", "--kv-ratio 0.5"),
        ("methods", (), r"--method \(\)"),
        ("methods", "heads", "--method heads"),
        ("methods", ("heads", "svd"), "--method"),
        ("align", "exact", "--align exact"),
        ("key_group", 3, "--key-group 3"),
        ("tensor_parallel_size", 0, "--tp 0"),
        ("tensor_parallel_size", 2.0, "--tp 2.0"),
        ("quantization", "int4", "--quantization int4"),
        ("max_loss", 1, "--max-loss 1"),
        ("latency", float("inf"), "--latency inf"),
    ],
)
def test_invalid_values_are_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanRequest(**{field: value})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"latency": 5.0, "latency_ratio": 0.5}, "--latency and --latency-ratio"),
        ({"max_loss": 0.01, "latency_ratio": 0.5}, "--max-loss"),
        ({"minimize": "bytes", "kv_ratio": 0.5}, "--minimize bytes"),
    ],
)
def test_conflicting_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanRequest(**given)


def test_all_methods_may_make_the_fastest_model() -> None:
    assert PlanRequest(max_loss=0.01).methods == ("heads", "prune", "lowrank")
    assert PlanRequest(max_loss=0.01, methods=["prune"]).methods == ["prune"]


def test_numbers_of_numpy_are_numbers() -> None:
    request = PlanRequest(param_ratio=float(np.float32(0.5)), decode_batch=np.int64(8))
    assert request.decode_batch == 8
