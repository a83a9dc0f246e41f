"""What tests share: the compressed demo model; and `gpu` tests are skipped without a GPU."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from tests.support.affected import affected, always, changed_since, commit_now
from tests.support.imports import ROOT
from tests.support.order import in_order
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

BEGUN = time.monotonic()
LATE = "a slow test, and the time for these is over (--slow-minutes)"

# How `make serve` compresses the demo model.
MAKE_SERVE = ("--plan", str(demo.PLAN), "--max-tokens", "16384")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-since",
        metavar="COMMIT",
        help="of the slow tests, run those that a change since COMMIT can break, and one of each "
        "kind; all of them if COMMIT is not in the history",
    )

    parser.addoption(
        "--slow-minutes",
        metavar="N",
        type=float,
        help="begin no slow test later, but for those that always run; the last lines name what is "
        "left out",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    commit = config.getoption("--slow-since")
    changed = changed_since(commit) if commit else None
    if changed is not None:
        files = affected(changed)
        runs, left_out = [], []
        for item in items:
            (runs if _runs(item, files) else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = runs
    is_limited = config.getoption("--slow-minutes") is not None
    slow = [item for item in items if is_limited and _is_slow(item)]
    order = in_order(
        {_file(item) for item in items},
        always={_file(item) for item in slow if always(item.nodeid)},
        slow={_file(item) for item in slow},
        commit=commit_now(),
    )
    places = {file: place for place, file in enumerate(order)}
    items.sort(key=lambda item: places[_file(item)])


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    late = [report.nodeid for report in skipped if LATE in str(report.longrepr)]
    if late:
        files = sorted({test.partition("::")[0] for test in late})
        terminalreporter.write_line(
            f"LEFT OUT: {len(late)} slow tests that this change may break, for want of time; "
            f"`make test-all` runs them: {', '.join(files)}"
        )


def _runs(item: pytest.Item, files: set[str]) -> bool:
    """Whether a test is a fast one, is in one of these files, or always runs."""
    return not _is_slow(item) or _file(item) in files or always(item.nodeid)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _file(item: pytest.Item) -> str:
    return str(item.path.relative_to(ROOT))


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--slow-minutes")
    is_late = minutes is not None and time.monotonic() - BEGUN > 60 * minutes
    if is_late and _is_slow(item) and not always(item.nodeid):
        pytest.skip(LATE)
    # Asked when such a test is about to run, so that runs without any never import torch here.
    if item.get_closest_marker("gpu") and not _cuda_is_available():
        pytest.skip("needs a CUDA GPU")


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def compressed_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as `make serve` compresses it, made once a session by the command itself."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent  # of all processes
    out = directory / "demo-gac"
    with (directory / "demo-gac.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = [Path(sys.executable).parent / "vllm-gac", "compress", demo.MODEL]
            subprocess.run([*command, "--out", out, *MAKE_SERVE], check=True)
    return out
