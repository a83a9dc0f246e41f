"""What an option allows, and what of a request is recorded."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from vllm_gac.errors import HealingError
from vllm_gac.options import Option, option, record_of, refuse_unexpected


@dataclass(frozen=True, slots=True)
class Asked:
    tokens: Any = field(
        default=None, metadata=option("--most-tokens", "", kind="count", maximum=100)
    )
    rate: Any = field(
        default=0.5, metadata=option("--rate", "", kind="number", minimum=0, maximum=1)
    )
    name: Any = field(default=None, metadata=option("--name", ""))
    exact: Any = field(default=False, metadata=option("--exact", "", kind="switch"))
    methods: Any = field(
        default=("a",), metadata=option("--method", "", kind="names", choices="ab")
    )

    def __post_init__(self) -> None:
        refuse_unexpected(self, HealingError)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tokens": 0}, "--most-tokens 0"),
        ({"tokens": True}, "--most-tokens True"),
        ({"tokens": 1.0}, "--most-tokens 1.0"),
        ({"tokens": 101}, "--most-tokens 101"),
        ({"tokens": 10**400}, "--most-tokens"),
        ({"rate": float("nan")}, "--rate nan"),
        ({"rate": None}, "--rate None"),
        ({"rate": False}, "--rate False"),
        ({"name": 7}, "--name 7"),
        ({"exact": None}, "--exact None"),
        ({"methods": "ab"}, "--method ab"),
        ({"methods": ["c"]}, "--method"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_its_flag(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(HealingError, match=named):
        Asked(**given)


def test_the_record_of_a_request_is_json_and_the_same_after_reading_it() -> None:
    record = record_of(Asked(tokens=np.int64(7), rate=np.float32(0.25), exact=True))
    assert record == {"tokens": 7, "rate": 0.25, "name": None, "exact": True, "methods": ["a"]}
    assert json.loads(json.dumps(record)) == record


def test_a_count_has_a_limit_that_sums_of_it_do_not_overflow() -> None:
    assert Option(("--n",), "", "count").expected(10**15) is None
    assert Option(("--n",), "", "count").expected(10**16) is not None
