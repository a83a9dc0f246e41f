"""Prints the jobs of a lease that runs the tests that need a GPU.

    NEEDS= PARTS=0 END=480 GPUS=1 EACH=12 PATIENCE=7 OMP_NUM_THREADS=1 lease.sh gpu_test_jobs 100

The first call of several. Each test function is a job, and all of a GPU run side by side: their
engines take a fixed number of bytes for their caches, so one may start while others free memory.
"""

import json
import re
from pathlib import Path

from benchmarks.real_models.lease_jobs import job

_FUNCTION = re.compile(r"^@pytest\.mark\.gpu\n(?:[@ )].*\n)*def (test_\w+)", re.MULTILINE)
_COMMAND = (
    "cd $TREE && timeout -s INT 380 python3 -m pytest -v -p no:cacheprovider -m gpu "
    "--basetemp $L/pytest-{name} {path} -k {function}"
)


def main() -> None:
    """Print them, those with engines first, since they take longest."""
    jobs = []
    for path in sorted(Path("tests").rglob("test_*.py"), key=lambda p: "serving" not in p.parts):
        for function in _FUNCTION.findall(path.read_text()):
            name = f"{path.stem}-{function}"
            command = _COMMAND.format(name=len(jobs), path=path, function=function)
            jobs.append(job(name, command, 60))
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
