"""Prints the jobs of a lease that runs the tests that need a GPU.

    NEEDS= PARTS=0 END=560 lease.sh gpu_test_jobs 100

The first call of several. Each file of tests has a GPU to itself, because an engine does not start
beside a process that gives memory back, and a limit of its own.
"""

import json
from pathlib import Path

from benchmarks.real_models.lease_jobs import job

_COMMAND = (
    "cd $TREE && timeout -s INT 170 python3 -m pytest -v -p no:cacheprovider -m gpu "
    "--basetemp $L/pytest-{name} {path}"
)


def main() -> None:
    """Print them."""
    paths = [path for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    jobs = [
        job(path.stem, _COMMAND.format(name=path.stem, path=path), 60) | {"alone": True}
        for path in sorted(paths)
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
