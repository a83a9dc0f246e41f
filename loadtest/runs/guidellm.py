"""Runs that guidellm measured, so that nobody need believe this project's client.

Of each benchmark in its JSON (schema 2) with constant or Poisson arrivals. A file NAME-N.json is
start N of the server NAME. guidellm tells when a request was due and sent, and when its first and
its last token came: there is no inter-token latency, and the verdict is on its lag alone. What the
end of a benchmark cut off has not failed, and counts as far as it came.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.runs.records import Record
from loadtest.runs.run import Run
from loadtest.runs.verdict import judge
from loadtest.traffic.generate import summary
from loadtest.traffic.scenario import Slo
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest, fingerprint

_NOTE = (
    "measured by guidellm, which does not tell when each token came, nor whether its process was "
    "awake: no ITL and no worst gap, and a verdict on how late it sent alone."
)


def read_guidellm(path: Path) -> list[Run]:
    """The runs of a file. Raises LoadTestError if it has none, or another schema."""
    try:
        content = json.loads(path.read_bytes())
        if content["metadata"]["version"] != 2:
            raise ValueError(f"schema {content['metadata']['version']}, expected 2")
        runs = list(_runs(path, content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadTestError(f"{path}: no benchmarks of guidellm: {error!r}") from error
    if not runs:
        raise LoadTestError(f"{path}: has no benchmark with constant or Poisson arrivals")
    return runs


def _runs(path: Path, content: dict[str, Any]) -> Iterator[Run]:
    about, named = content["metadata"], re.fullmatch(r"(.+)-\d+", path.stem)
    for benchmark in content["benchmarks"]:
        config, times = benchmark["config"], benchmark["scheduler_metrics"]
        strategy, backend, begun = config["strategy"], config["backend"], times["start_time"]
        if strategy["type_"] not in ("constant", "poisson"):
            continue
        if config.get("sample_size") is not None:
            raise ValueError(f"a sample of {config['sample_size']} requests, expected all")
        rate, ends = float(strategy["rate"]), times["measure_end_time"] - begun
        name = f"guidellm-{strategy['type_']}"
        scenario = {"name": name, "rate": rate, "duration": ends, "slo": Slo().model_dump()}
        records = _records(benchmark["requests"], begun)
        requests = tuple(
            ScheduledRequest(
                timestamp=round(1000 * record.scheduled),
                input_length=record.input_length,
                output_length=record.output_length or record.completion_tokens or 1,
            )
            for record in records
        )
        if not records:
            raise ValueError("a benchmark without a request")
        due = np.array([record.scheduled for record in records])
        traffic = {"scenario": scenario | {"description": ""}, "attribution": "guidellm's data"}
        traffic |= summary(due, requests, 0.0, 0)
        info = {
            "label": named[1] if named else path.stem,
            "start": path.stem,
            "start_at": begun,
            "processes": 0,
            "client": "guidellm",
            "schedule_sha256": f"{fingerprint(path)}@{rate:g}",
            "window": [times["measure_start_time"] - begun, ends],
            # Not all of the backend: it has the key.
            "command": f"guidellm, {strategy['type_']} at {rate:g}/s",
            "base_url": backend.get("target", ""),
            "model": backend.get("model") or "",
            "endpoint": backend.get("request_format") or "",
            "server_version": "unknown",
            "versions": {"guidellm": about["guidellm_version"]},
            "hardware": {"cpu": about["platform"], "memory": "unknown", "gpu": "unknown"},
        }
        schedule = Schedule(requests, PromptRules(), traffic, (_NOTE,))
        verdict = judge(records, [], len(records), 0)
        yield Run(path / f"{rate:g}-per-second", info, schedule, records, [], verdict, {})


def _records(requests: dict[str, Any], begun: float) -> list[Record]:
    """The requests that were sent, in the order in which they were due."""
    records = []
    for fate in ("successful", "incomplete", "errored"):
        for request in requests.get(fate) or ():
            times = request["info"]["timings"]
            if times["targeted_start"] is None or times["request_start"] is None:
                continue
            asked, tokens = (request[f"{m}_metrics"]["text_tokens"] for m in ("input", "output"))
            due, sent = times["targeted_start"] - begun, times["request_start"] - begun
            # Not the answer's own length, which would hide that a server stops early.
            most = _most_tokens(request)
            record = Record(0, due, asked or 1, most, sent, cancelled=fate == "incomplete")
            record.ended = (times["request_end"] or times["resolve_end"]) - begun
            record.prompt_tokens, record.completion_tokens = asked, tokens
            first, last = times["first_token_iteration"], times["last_token_iteration"]
            if first is not None:
                count = max(times["token_iterations"], 1)
                record.tokens = (np.linspace(first, last, count) - begun).tolist()
            elif fate == "successful":
                record.tokens = [record.ended]  # the answer came as a whole
            if fate == "errored":
                record.error = str(request["info"].get("error") or "an error")[:300]
            records.append(record)
    records.sort(key=lambda record: record.scheduled)
    for index, record in enumerate(records):
        record.index = index
    return records


def _most_tokens(request: dict[str, Any]) -> int:
    """How many tokens an answer should have, by the body that guidellm sent; 0: unknown."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    try:
        body = json.loads(request.get("request_args") or "{}")["body"]
        return next((int(body[name]) for name in names if body.get(name)), 0)
    except (ValueError, KeyError, TypeError, AttributeError):  # of a backend that is not HTTP
        return 0
