"""The numbers of a report: per server and rate, the latencies, throughput and goodput of its runs.

Runs with the same label and schedule are repeats and are pooled. Failed requests count in goodput
and in the failure rate; latencies are of the answers that came.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.report.bootstrap import (
    Estimate,
    Ints,
    Samples,
    block_numbers,
    block_weights,
    interval,
    mean_draws,
    percentile,
)
from loadtest.runs.records import Record
from loadtest.runs.run import Run
from loadtest.traffic.scenario import Slo

MEASURES = ("ttft", "tpot", "itl", "e2e")
PERCENTS = (50.0, 90.0, 99.0)
_BLOCK = 10.0  # seconds, as long as the queues that make neighbours alike
_MIN_BLOCKS = 8  # per run; below, blocks get shorter, and the report says so


@dataclass(frozen=True, slots=True)
class Group:
    """All repeats of one server (`label`) under one schedule."""

    label: str
    rate: float
    schedule: str
    runs: tuple[Run, ...]
    slo: Slo
    warmup: float
    block: float
    samples: dict[str, Samples]
    good: Samples
    weights: Ints

    @property
    def traffic(self) -> str:
        """The scenario's name."""
        return str(self.scenario.get("name", "replayed trace"))

    @property
    def scenario(self) -> dict[str, Any]:
        """What the schedule was made from; nothing for a foreign trace."""
        found: dict[str, Any] = self.runs[0].schedule.traffic.get("scenario", {})
        return found

    @property
    def records(self) -> list[Record]:
        """The records of all repeats, without the warm-up."""
        return [r for run in self.runs for r in run.records if r.scheduled >= self.warmup]


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies in seconds by measure and percentile; rates per second."""

    latency: dict[str, dict[float, Estimate]]
    requests: int
    failed: int
    requests_per_second: float
    output_tokens_per_second: float
    input_tokens_per_second: float
    good_fraction: Estimate
    goodput: float
    tokens_per_event: float


def group_runs(
    runs: Sequence[Run], warmup: float, slo_ttft: float | None, slo_tpot: float | None
) -> list[Group]:
    """Pool the repeats; groups by traffic, then in order of rate, then of first appearance."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        key = (run.info["schedule_sha256"], run.info["label"])
        by_key.setdefault(key, []).append(run)
    groups = [
        _group(label, sha, members, warmup, _slo(members[0], slo_ttft, slo_tpot))
        for (sha, label), members in by_key.items()
    ]
    kinds = list(dict.fromkeys(group.traffic for group in groups))
    return sorted(groups, key=lambda group: (kinds.index(group.traffic), group.rate))


def summarize(group: Group) -> Summary:
    """The numbers of one group."""
    latency = {
        measure: {p: percentile(samples, p, group.weights) for p in PERCENTS}
        for measure, samples in group.samples.items()
    }
    answered = [record for record in group.records if record.ok]
    seconds = sum(_seconds(run, group.warmup) for run in group.runs)
    output = sum(record.output_tokens for record in answered)
    good = interval(*mean_draws(group.good, group.weights))
    return Summary(
        latency=latency,
        requests=len(group.records),
        failed=len(group.records) - len(answered),
        requests_per_second=len(answered) / seconds,
        output_tokens_per_second=output / seconds,
        input_tokens_per_second=sum(r.prompt_tokens or r.input_length for r in answered) / seconds,
        good_fraction=good,
        goodput=float(group.good.values.sum()) / seconds,
        tokens_per_event=output / max(sum(len(record.tokens) for record in answered), 1),
    )


def scheduled_rate(run: Run) -> float:
    """Requests per second that the schedule asks for."""
    scenario = run.schedule.traffic.get("scenario", {})
    seconds = scenario.get("duration") or max(run.schedule.duration, 1e-3)
    return float(scenario.get("rate") or len(run.schedule.requests) / seconds)


def _slo(run: Run, ttft: float | None, tpot: float | None) -> Slo:
    said = Slo.model_validate(run.schedule.traffic.get("scenario", {}).get("slo", {}))
    return Slo(ttft=ttft or said.ttft, tpot=tpot or said.tpot)


def _group(label: str, sha: str, runs: Sequence[Run], warmup: float, slo: Slo) -> Group:
    span = max(runs[0].schedule.duration - warmup, 1e-3)
    block = min(_BLOCK, span / _MIN_BLOCKS)
    per_run = int(span / block) + 1
    values: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    blocks: dict[str, list[int]] = {measure: [] for measure in MEASURES}
    good, good_blocks = [], []
    for number, run in enumerate(runs):
        records = [record for record in run.records if record.scheduled >= warmup]
        where = block_numbers([r.scheduled for r in records], warmup, block, number * per_run)
        for record, at in zip(records, where.tolist(), strict=True):
            good.append(float(_is_good(record, slo)))
            good_blocks.append(at)
            for measure, latencies in _latencies(record).items():
                values[measure] += latencies
                blocks[measure] += [at] * len(latencies)
    return Group(
        label=label,
        rate=scheduled_rate(runs[0]),
        schedule=sha,
        runs=tuple(runs),
        slo=slo,
        warmup=warmup,
        block=block,
        samples={
            measure: Samples(np.array(values[measure]), np.array(blocks[measure], dtype=np.int64))
            for measure in MEASURES
        },
        good=Samples(np.array(good), np.array(good_blocks, dtype=np.int64)),
        weights=block_weights(per_run * len(runs)),
    )


def _latencies(record: Record) -> dict[str, list[float]]:
    if not record.ok:
        return {}
    found = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    single = {measure: [value] for measure, value in found.items() if not math.isnan(value)}
    return single | {"itl": record.itls}


def _is_good(record: Record, slo: Slo) -> bool:
    # An answer of one token has no TPOT, and keeps that promise.
    return record.ok and record.ttft <= slo.ttft and not record.tpot > slo.tpot


def _seconds(run: Run, warmup: float) -> float:
    ends = [r.ended for r in run.records if r.scheduled >= warmup and not math.isnan(r.ended)]
    return max(max(ends, default=warmup) - warmup, 1e-3)
