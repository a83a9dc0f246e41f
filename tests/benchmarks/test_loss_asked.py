"""The page of losses that were asked for."""

from argparse import Namespace

from benchmarks.common.page import command_line
from benchmarks.quality.loss_asked import page

ABOUT = {
    "parameters": 30_400_000,
    "trained_tokens": 44_000_000,
    "machine": "GPU",
    "date": "today",
    "command": "python",
}
MADE = {
    "parameters": 8,
    "dense_parameters": 10,
    "kv_bytes_per_token": 3,
    "dense_kv_bytes_per_token": 4,
    "max_loss": {
        "measured": {"time": 0.7, "ratio": 1.008, "low": 1.006, "high": 1.0099},
        "tried": [1, 2],
    },
}


def line(**row: object) -> str:
    found = {"asked": 1.0, "heal_tokens": 0, **row}
    return page({**ABOUT, "rows": [found]}).splitlines()[-1]


def test_a_row_says_what_was_asked_reached_and_gained() -> None:
    elsewhere = {"ratio": 1.0101, "interval": [1.005, 1.015]}
    assert line(made=MADE, elsewhere=elsewhere) == (
        "| 1 % | - | 2 | 0.700 | 80.0% | 75.0% | 0.80 % (0.60 to 0.99) | 1.01 % (0.50 to 1.50) | "
        "no |"
    )
    within = line(made=MADE, elsewhere={"ratio": 1.01, "interval": None}, heal_tokens=1000)
    assert within.startswith("| 1 % | 1,000 tokens |")
    assert within.endswith("| 1.00 % | yes |")


def test_a_command_names_the_options_that_are_not_as_usual() -> None:
    usual = {"percent": [1.0], "max_tokens": None, "strongest": False, "device": "cpu"}
    given = Namespace(**usual, out="a path of this machine")
    assert command_line("python -m x OUT", given, usual) == "python -m x OUT"
    given = Namespace(percent=[1.0, 2.0], max_tokens=64, strongest=True, device="cpu")
    said = "python -m x OUT --percent 1.0 2.0 --max-tokens 64 --strongest"
    assert command_line("python -m x OUT", given, usual) == said


def test_what_was_refused_says_why() -> None:
    assert line(refused="error: no") == "| 1 % | - | error: no | - | - | - | - | - | - |"
