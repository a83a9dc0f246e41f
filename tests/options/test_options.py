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
    tokens: Any = field(default=None, metadata=option("--most-tokens", "", kind="count", most=100))
    rate: Any = field(default=0.5, metadata=option("--rate", "", kind="number", least=0, most=1))
    exact: Any = field(default=False, metadata=option("--exact", "", kind="switch"))
    methods: Any = field(
        default=("a",), metadata=option("--method", "", kind="names", choices="ab")
    )

    def __post_init__(self) -> None:
        refuse_unexpected(self, HealingError, by_flag=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": 0}, "--most-tokens 0: expected an integer of at least 1"),
        ({"tokens": True}, "--most-tokens True: expected an integer of at least 1"),
        ({"tokens": 1.0}, "--most-tokens 1.0: expected an integer of at least 1"),
        ({"tokens": 101}, "--most-tokens 101: expected 100 at most"),
        ({"tokens": 10**400}, "expected 100 at most"),
        ({"rate": float("nan")}, "--rate nan: expected a number from 0 to 1"),
        ({"rate": None}, "--rate None: expected a number from 0 to 1"),
        ({"rate": False}, "--rate False: expected a number from 0 to 1"),
        ({"exact": None}, "--exact None: expected True or False"),
        ({"methods": "ab"}, "--method ab: expected some of a, b"),
        ({"methods": ["c"]}, "expected some of a, b"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_its_flag(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(HealingError) as caught:
        Asked(**given)
    assert str(caught.value).endswith(said)


def test_the_record_of_a_request_is_json_and_the_same_after_reading_it() -> None:
    record = record_of(Asked(tokens=np.int64(7), rate=np.float32(0.25), exact=True))
    assert record == {"tokens": 7, "rate": 0.25, "exact": True, "methods": ["a"]}
    assert json.loads(json.dumps(record)) == record


def test_a_count_has_a_limit_that_sums_of_it_do_not_overflow() -> None:
    assert Option(("--n",), "", "count").expected(10**15) is None
    assert Option(("--n",), "", "count").expected(10**16) == "1,000,000,000,000,000 at most"
