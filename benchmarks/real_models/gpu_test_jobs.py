"""Prints the jobs of a lease that runs the tests that need a GPU.

    NEEDS= PARTS=0 END=480 GPUS=1 EACH=12 PATIENCE=3.5 OMP_NUM_THREADS=1 lease.sh gpu_test_jobs 100

The first call of several. TESTS are names of test files, if not all. Each test function is a job,
and all of a GPU run side by side: their engines take a fixed number of bytes for their caches, so
one may start while others free memory.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.real_models.lease import job

_FUNCTION = re.compile(r"^@pytest\.mark\.gpu\n(?:[@ )].*\n)*def (test_\w+)", re.MULTILINE)
_COMMAND = (
    "cd $TREE && timeout -s INT 380 python3 -m pytest -v -p no:cacheprovider -m gpu "
    "--basetemp $L/pytest-{name} {path} -k {function}"
)


def gpu_tests(names: str) -> list[dict[str, Any]]:
    """The jobs of test_NAME.py for each of `names`, those with engines first: they take longest."""
    jobs: list[dict[str, Any]] = []
    paths = {path for name in names.split() for path in Path("tests").rglob(f"test_{name}.py")}
    for path in sorted(paths, key=lambda path: ("serving" not in path.parts, path)):
        for function in _FUNCTION.findall(path.read_text()):
            command = _COMMAND.format(name=f"{path.stem}{len(jobs)}", path=path, function=function)
            jobs.append(job(f"{path.stem}-{function}", command, 120))
    return jobs


if __name__ == "__main__":
    print(json.dumps(gpu_tests(os.environ.get("TESTS", "*")), indent=1))
