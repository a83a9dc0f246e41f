"""An engine in its process answers, fails, dies and hangs as the caller expects; vLLM is faked."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.common.engine_process import Engine, EngineError
from tests.support.waiting import PATIENCE, wait_until_gone

VLLM = """
__version__ = "0.32.0"

class LLM:
    def __init__(self, **options):
        if "refused" in options:
            raise ValueError(options["refused"])
        self.options = options
"""
ROOT = Path(__file__).parents[2]


def options(llm: Any, **more: Any) -> dict[str, Any]:
    return llm.options | more


def fail(llm: Any) -> None:
    raise RuntimeError("no kernel")


def die(llm: Any) -> None:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(llm: Any) -> None:
    time.sleep(600)


def child(llm: Any) -> int:
    """A process that would outlive the engine, as vLLM's workers may."""
    if pid := os.fork():
        return pid
    time.sleep(600)
    return 0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    (tmp_path / "vllm.py").write_text(VLLM)
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        path = f"{tmp_path}:{ROOT}"
        engines.append(Engine("fake", tmp_path / "logs" / "fake.log", PYTHONPATH=path))
        engines[-1].start(**options)
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_functions_are_called_with_the_engine(started: Callable[..., Engine]) -> None:
    engine = started(model="m")
    assert engine.wait(PATIENCE) < PATIENCE
    assert engine.ask(options, seconds=PATIENCE, seed=1) == {"model": "m", "seed": 1}
    assert engine.ask(options) == {"model": "m"}


@pytest.mark.parametrize(
    ("question", "message"),
    [(fail, "RuntimeError: no kernel"), (die, "died: last words")],
    ids=["fails", "dies"],
)
def test_an_engine_that_failed_raises_the_same_error_from_then_on(
    started: Callable[..., Engine], question: Callable[..., Any], message: str
) -> None:
    engine = started()
    for function in (question, options):
        with pytest.raises(EngineError, match=message):
            engine.ask(function)


def test_an_engine_that_does_not_start_says_why(started: Callable[..., Engine]) -> None:
    with pytest.raises(EngineError, match="ValueError: no memory"):
        started(refused="no memory").wait()


def test_an_engine_that_hangs_is_given_up(started: Callable[..., Engine]) -> None:
    engine = started()
    engine.wait(PATIENCE)
    with pytest.raises(EngineError, match=r"no answer after 1 s; see .*fake\.log"):
        engine.ask(hang, seconds=1.0)


def test_closing_ends_what_the_engine_started(started: Callable[..., Engine]) -> None:
    engine = started()
    left = [psutil.Process(engine.ask(child))]
    engine.close()
    wait_until_gone(left)
