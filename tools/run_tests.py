"""Runs pytest. Tests that fail run once more, alone: what passes then is named as flaky.

    python -m tools.run_tests OPTIONS OF PYTEST

The exit status is pytest's: 1 if a test fails twice, and not 0 if pytest itself could not go on.
"""

import json
import subprocess
import sys
from pathlib import Path

CACHE = Path("build/pytest_cache")
# More failures than these are no accidents, and running them one by one would take long.
MAX_RETRIED = 20


def run_tests(options: list[str]) -> int:
    """Run pytest with these options, and its failed tests again.

    Args:
        options: of pytest, without tests or folders; xdist's processes are for the first run only.

    Returns:
        The exit status: 0 if every test passed, at the first or at the second try.
    """
    pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}", *options]
    status = subprocess.run([*pytest, "--cache-clear", "--maxfail=0"], check=False).returncode
    failed = _failed() if status == 1 else []
    if not 0 < len(failed) <= MAX_RETRIED:
        return status
    print(f"\n{len(failed)} failed. Once more, alone:", flush=True)
    status = subprocess.run([*pytest, "-n", "0", *failed], check=False).returncode
    for test in sorted(set(failed) - set(_failed() if status else [])):
        print(f"FLAKY: failed, and passed when it ran alone: {test}")
    return status


def _failed() -> list[str]:
    """The tests that failed in the last run, as pytest keeps them."""
    path = CACHE / "v/cache/lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    sys.exit(run_tests(sys.argv[1:]))
