"""Replays one schedule by this client and by `vllm bench serve`, and compares their numbers.

Both clients send the same lengths at the same moments to the same server, one client after the
other. Their prompts differ, so that neither finds the other's in the prefix cache. As in `vllm
bench serve`, latencies count from sending here, and percentiles are interpolated.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.client.command import INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.runs.access import request_headers, server_version
from loadtest.runs.machine import hardware, versions
from loadtest.runs.records import Record
from loadtest.runs.run import load_run
from loadtest.runs.target import Target
from loadtest.traffic.schedule import read_schedule
from vllm_gac.checkpoint.atomic_files import write_json, write_text

_PERCENTS = (50, 90, 99)
# Our name of a measure -> its name in `vllm bench serve`.
_MEASURES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Agreement:
    """A number of both clients, in milliseconds or tokens per second. `judged` ones must agree."""

    name: str
    ours: float
    theirs: float
    judged: bool

    @property
    def ratio(self) -> float:
        """Our number divided by theirs."""
        return self.ours / self.theirs

    @property
    def agrees(self) -> bool:
        """Whether both numbers are within 5 % of each other."""
        return abs(self.ratio - 1) <= TOLERANCE


def crosscheck(
    schedule: Path, base_url: str, model: str, tokenizer: str, out: Path
) -> list[Agreement]:
    """Run both clients against the server at `base_url`; write out/crosscheck.json and .md.

    Medians and throughput are judged. Tails are not, because they differ between any two runs.
    Raises LoadTestError if a client fails, or if our client was a bottleneck.
    """
    target = Target(base_url, model, headers=request_headers(()))
    out.mkdir(parents=True, exist_ok=True)
    if (out / "crosscheck.json").exists():
        raise LoadTestError(f"{out}: holds a cross-check already; name another directory")
    theirs = _bench(schedule, base_url, model, tokenizer, out)
    ours = _locust(schedule, base_url, model, out / "run")
    found = _compare(ours, theirs)
    about = {
        "server_version": server_version(target),
        "versions": versions(),
        "hardware": hardware(),
        "requests": len(ours),
        "numbers": {a.name: {"ours": a.ours, "theirs": a.theirs} for a in found},
    }
    write_json(out / "crosscheck.json", about)
    write_text(out / "crosscheck.md", markdown(found))
    return found


def markdown(found: Sequence[Agreement]) -> str:
    """The numbers as a table in Markdown."""
    rows = ["| | this client | vllm bench serve | ratio | within 5 % |", "| --- " * 5 + "|"]
    for a in found:
        judgement = ("yes" if a.agrees else "NO") if a.judged else ""
        rows.append(f"| {a.name} | {a.ours:.2f} | {a.theirs:.2f} | {a.ratio:.3f} | {judgement} |")
    return "\n".join(rows) + "\n"


def _bench(
    schedule: Path, base_url: str, model: str, tokenizer: str, out: Path
) -> dict[str, float]:
    read = read_schedule(schedule)
    if any(r.session_id is not None or r.cancel_after or r.body for r in read.requests):
        raise LoadTestError(
            f"{schedule}: has sessions, bodies or clients that hang up, and `vllm bench serve` "
            "would do nothing of that; compare the clients with another scenario"
        )
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "vllm"),
        *("--base-url", base_url, "--model", model, "--tokenizer", tokenizer),
        *("--dataset-name", "timed_trace", "--dataset-path", str(schedule)),
        *("--timed-trace-sec-multiplier", "0.001"),
        *("--timed-trace-chunk-hash-size", str(read.prompts.block_tokens)),
        *("--num-prompts", str(len(read.requests)), "--temperature", "0", "--disable-tqdm"),
        # The ready check would send the first prompt twice.
        *("--ready-check-timeout-sec", "0"),
        *("--percentile-metrics", ",".join(_MEASURES.values())),
        *("--metric-percentiles", ",".join(map(str, _PERCENTS))),
        *("--save-result", "--result-dir", str(out), "--result-filename", "vllm-bench.json"),
    ]
    _run(command, (0,))
    found: dict[str, float] = json.loads((out / "vllm-bench.json").read_text(encoding="utf-8"))
    if found["completed"] != len(read.requests):
        raise LoadTestError(
            f"{base_url}: answered {found['completed']} of {len(read.requests)} requests of "
            "vllm bench serve; clients are compared by requests that were all answered"
        )
    return found


def _locust(schedule: Path, base_url: str, model: str, out: Path) -> list[Record]:
    _run(client_command(base_url, model, schedule, out), (0, INVALID))
    run = load_run(out)
    if not run.verdict.valid:
        raise LoadTestError(f"{out}: INVALID: {'; '.join(run.verdict.reasons)}")
    failed = [record for record in run.records if not record.ok]
    if failed:
        raise LoadTestError(f"{out}: {len(failed)} requests failed: {failed[0].error}")
    return run.records


def _run(command: Sequence[str], accepted: Sequence[int]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-15:])
        raise LoadTestError(f"{command[0]} exited with {done.returncode}: {tail}")


def _compare(records: Sequence[Record], theirs: dict[str, float]) -> list[Agreement]:
    values = {
        "ttft": [r.ttft - r.lag for r in records],
        "tpot": [r.tpot for r in records if r.tpot == r.tpot],
        "itl": [gap for r in records for gap in r.itls],
        "e2e": [r.e2e - r.lag for r in records],
    }
    found = []
    for measure, their_name in _MEASURES.items():
        for percent in _PERCENTS:
            ours = float(np.percentile(values[measure], percent)) * 1e3
            name = f"{measure.upper() if measure != 'e2e' else 'answer'} p{percent}, ms"
            number = float(theirs[f"p{percent}_{their_name}_ms"])
            found.append(Agreement(name, ours, number, percent == 50))
    tokens = sum(record.output_tokens for record in records)
    seconds = max(record.ended for record in records)
    throughput = float(theirs["output_throughput"])
    return [*found, Agreement("output tokens per second", tokens / seconds, throughput, True)]
