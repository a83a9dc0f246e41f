"""Run tests on a machine that is busy and uneven, to find those that measure its clock.

`python -m tools.stress_tests tests/loadtest -m "not slow and not gpu"`: the arguments are pytest's.
Beside it some processes compute without a pause, and random processes of the suite are stopped for
up to two seconds each, one after the other, until pytest ends. Its exit status is passed on.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

MAX_STOP = 2.0  # seconds that a process is stopped, and seconds that all of them then run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest with the arguments that are not this command's own. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.stress_tests", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--busy", type=int, default=4, help="processes that compute (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of who is stopped when (default: 0)")
    options, asked = parser.parse_known_args(arguments)
    with contextlib.ExitStack() as stack:
        for _ in range(options.busy):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        tests = subprocess.Popen([sys.executable, "-m", "pytest", *asked])
        stops = _disturb(tests, random.Random(options.seed))
    print(f"{stops} stops beside {options.busy} busy processes")
    return tests.returncode


def _disturb(tests: subprocess.Popen[bytes], chance: random.Random) -> int:
    """Stop processes of `tests` until they have ended. Returns how often one was stopped."""
    suite, stops = psutil.Process(tests.pid), 0
    while not _ends_within(tests, chance.uniform(0.0, MAX_STOP)):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim = chance.choice([suite, *suite.children(recursive=True)])
            victim.suspend()
            stops += 1
            try:
                time.sleep(chance.uniform(0.0, MAX_STOP))
            finally:
                victim.resume()
    return stops


def _ends_within(tests: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        tests.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
