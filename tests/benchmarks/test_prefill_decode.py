"""The page of prefill on one GPU and decode on another, with invented results."""

from benchmarks.engines.prefill_decode import page

ABOUT = {
    "command": "python",
    "commit": "0",
    "date": "today",
    "machine": "GPU",
    "vllm": "0.32.0",
    "seconds": 30.0,
}


def test_the_page_says_what_is_equal_and_when_answers_begin() -> None:
    equal = {"prompts": 9, "equal": 8, "tokens_equal": 9, "worst": 0.0625}
    times = {
        "requests": 240,
        "short_ttft": [20.0, 40.0],
        "short_tpot": [5.0, 6.0],
        "long_ttft": [80.0, 90.0],
        "long_tpot": [5.5, 6.5],
    }
    text = page(
        {**ABOUT, "equal": {"demo-gac, bf16": equal}, "traffic": {"8.0": {"one server": times}}}
    )
    assert "| demo-gac, bf16 | 9 | 8 | 9 | 0.0625 |" in text
    row = "| 8.0 | one server | 240 | 20.0, 40.0 | 5.0, 6.0 | 80.0, 90.0 | 5.5, 6.5 |"
    assert row in text
