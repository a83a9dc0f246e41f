"""The arithmetic and the page of the combinations, with invented results."""

import pytest

from benchmarks.common.completions import compared
from benchmarks.engines.combinations.report import page


def answers(*tokens: list[int]) -> list[dict[str, list[int]]]:
    return [{"tokens": answer} for answer in tokens]


def test_logprobs_and_answers_are_summed_up_against_another_engine() -> None:
    base = {"logprobs": [-1.0, -2.0, -3.0], "answers": answers([1, 2, 3], [4, 5])}
    said = {"logprobs": [-1.5, -2.0, -2.0], "answers": answers([1, 9, 3], [4, 5]), "draft": 7}
    found = compared(said, base)
    assert found.pop("perplexity") == pytest.approx(2.718281828 ** (5.5 / 3))
    assert found == {
        "draft": 7,
        "mean_difference": 0.5,
        "largest_difference": 1.0,
        "equal_tokens": 3,  # tokens after the first difference do not count
        "tokens": 5,
    }


def test_an_engine_that_failed_stays_as_it_is_and_is_nothing_to_compare_with() -> None:
    failed = {"error": "out of memory"}
    assert compared(failed, {"logprobs": [-1.0]}) == failed
    assert compared({"logprobs": [0.0]}, failed) == {"perplexity": 1.0}


def test_the_page_tells_of_failures_and_of_speed_over_the_first_row() -> None:
    facts = {"linears": ["Fp8"], "attention": ["GAC"]}
    part = {
        "machine": "GPU",
        "torch": "2",
        "date": "today",
        "commit": "abc",
        "command": "command",
        "seconds": 3,
        "throughput": {
            "dense bf16": {"seconds": {"1x1->1": [2.0, 2.0, 4.0]}, "facts": facts},
            "gac fp8": {"seconds": {"1x1->1": [1.0]}, "facts": facts},
            "misaligned fp8": {"error": "no kernel | none"},
        },
        "perplexity": {"demo bf16": {"perplexity": 9.5}, "demo fp8": {"error": "no"}},
    }
    lines = page({"parts": {"quantization": part}}).splitlines()
    assert "| dense bf16 | 2.000 (1.00x) | Fp8 | GAC |" in lines
    assert "| gac fp8 | 1.000 (2.00x) | Fp8 | GAC |" in lines
    assert "| misaligned fp8 | no kernel / none |  |  |" in lines
    assert "| demo bf16 | 9.5000 |  |  |" in lines
    assert "| demo fp8 | no |  |  |" in lines
