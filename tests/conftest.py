"""What tests share: the demo model, the order of files, and what a run says at its end."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from vllm_gac import demo

# How long it takes to make and to try an example depends on what else the machine does.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What passes at a commit passes at it again: an example that no one has seen fails in `make
# test-all`, which tries new ones, and not in the run that decides on a change.
settings.register_profile("same examples", ANY_TIME, derandomize=True)
settings.register_profile("new examples", ANY_TIME)
settings.load_profile("same examples")

# A shell that runs the suite in the background makes it ignore Ctrl-C, and so would the processes
# that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How `make serve` compresses the demo model.
MAKE_SERVE = ("--plan", str(demo.PLAN), "--max-tokens", "16384")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files begin at the end of the alphabet, where the folders lie that take minutes.

    Two processes share the files; if such a file came last, one would have nothing to do.
    """
    items.sort(key=lambda item: item.path, reverse=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for package in (mark.args[0] for mark in item.iter_markers("needs")):
        if find_spec(package) is None:  # which imports nothing
            pytest.skip(f"needs {package}")
    # Asked when such a test is about to run, so that runs without any never import torch here.
    if item.get_closest_marker("gpu") and not _cuda_is_available():
        pytest.skip("needs a CUDA GPU")


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say what was skipped for want of what, and which tests passed at the second try only."""
    stats = terminalreporter.stats
    skipped = [str(report.longrepr[2]) for report in stats.get("skipped", [])]
    reasons = Counter(
        re.sub(r"could not import '(\w+).*", r"needs \1", reason.removeprefix("Skipped: "))
        for reason in skipped
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"SKIPPED {count}: {reason}")
    passed = {report.nodeid for report in stats.get("passed", [])}
    for report in stats.get("rerun", []):
        if report.nodeid in passed:
            terminalreporter.write_line(f"{report.longreprtext}\nFLAKY: {report.nodeid}")


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to calibrate small models on."""
    from tests.support.dense_models import write_text

    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def compressed_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as `make serve` compresses it, made by the command itself."""
    return _made_once(tmp_path_factory, "demo-gac", "compress", demo.MODEL, *MAKE_SERVE)


@pytest.fixture(scope="session")
def demo_statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress` measures of the demo model for its usual methods, and on as much text."""
    asked = ("--text", demo.CALIBRATION, "--method", "heads,prune", "--device", "cpu")
    return _made_once(tmp_path_factory, "demo-stats", "calibrate", demo.MODEL, *asked)


def _made_once(factory: pytest.TempPathFactory, name: str, *words: str | Path) -> Path:
    """What a command writes as --out, once for all processes of a session."""
    directory = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes
    out = directory / name
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = [Path(sys.executable).parent / "vllm-gac", *words, "--out", out]
            subprocess.run(command, check=True)
    return out
