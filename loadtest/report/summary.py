"""The numbers of a report: latencies, throughput and goodput of each server at each rate.

Runs with the same label and schedule are repeats, and they are pooled. Failed requests count in
goodput and in the failure rate. Latencies cover answered requests only.
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
_BLOCK = 10.0  # seconds, about as long as a queue that makes neighbouring requests alike
_MIN_BLOCKS = 8  # per run; shorter runs get shorter blocks, and the report says so


@dataclass(frozen=True, slots=True)
class PooledRuns:
    """All repeats of one server under one schedule, pooled.

    Attributes:
        label: the server.
        rate: scheduled requests per second.
        schedule: SHA-256 of the schedule file.
        runs: the repeats.
        slo: what a request must meet.
        warmup: seconds at the start of each run that do not count.
        block: seconds of one bootstrap block.
        samples: latencies in seconds, by measure.
        kept_slo: 1.0 for each request that kept the SLO, 0.0 for the others.
        weights: [draws, blocks], how often each bootstrap resample takes each block.
    """

    label: str
    rate: float
    schedule: str
    runs: tuple[Run, ...]
    slo: Slo
    warmup: float
    block: float
    samples: dict[str, Samples]
    kept_slo: Samples
    weights: Ints

    @property
    def traffic(self) -> str:
        """The scenario's name."""
        return str(self.scenario.get("name", "replayed trace"))

    @property
    def scenario(self) -> dict[str, Any]:
        """The scenario that the schedule was made from; empty for a trace of another tool."""
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
) -> list[PooledRuns]:
    """Pool the repeats. Groups are sorted by traffic, then by rate, then by first appearance."""
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


def summarize(group: PooledRuns) -> Summary:
    """The numbers of one group."""
    latency = {
        measure: {p: percentile(samples, p, group.weights) for p in PERCENTS}
        for measure, samples in group.samples.items()
    }
    answered = [record for record in group.records if record.ok]
    seconds = sum(_seconds(run, group.warmup) for run in group.runs)
    output = sum(record.output_tokens for record in answered)
    kept_slo = interval(*mean_draws(group.kept_slo, group.weights))
    return Summary(
        latency=latency,
        requests=len(group.records),
        failed=len(group.records) - len(answered),
        requests_per_second=len(answered) / seconds,
        output_tokens_per_second=output / seconds,
        input_tokens_per_second=sum(r.prompt_tokens or r.input_length for r in answered) / seconds,
        good_fraction=kept_slo,
        goodput=float(group.kept_slo.values.sum()) / seconds,
        tokens_per_event=output / max(sum(len(record.tokens) for record in answered), 1),
    )


def scheduled_rate(run: Run) -> float:
    """Requests per second that the schedule asks for."""
    scenario = run.schedule.traffic.get("scenario", {})
    seconds = scenario.get("duration") or max(run.schedule.duration, 1e-3)
    return float(scenario.get("rate") or len(run.schedule.requests) / seconds)


def _slo(run: Run, ttft: float | None, tpot: float | None) -> Slo:
    given = Slo.model_validate(run.schedule.traffic.get("scenario", {}).get("slo", {}))
    return Slo(ttft=ttft or given.ttft, tpot=tpot or given.tpot)


def _group(label: str, sha: str, runs: Sequence[Run], warmup: float, slo: Slo) -> PooledRuns:
    span = max(runs[0].schedule.duration - warmup, 1e-3)
    block = min(_BLOCK, span / _MIN_BLOCKS)
    per_run = int(span / block) + 1
    values: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    blocks: dict[str, list[int]] = {measure: [] for measure in MEASURES}
    kept_slo, request_blocks = [], []
    for number, run in enumerate(runs):
        records = [record for record in run.records if record.scheduled >= warmup]
        numbers = block_numbers([r.scheduled for r in records], warmup, block, number * per_run)
        for record, block_number in zip(records, numbers.tolist(), strict=True):
            kept_slo.append(float(_keeps_slo(record, slo)))
            request_blocks.append(block_number)
            for measure, latencies in _latencies(record).items():
                values[measure] += latencies
                blocks[measure] += [block_number] * len(latencies)
    return PooledRuns(
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
        kept_slo=Samples(np.array(kept_slo), np.array(request_blocks, dtype=np.int64)),
        weights=block_weights(per_run * len(runs)),
    )


def _latencies(record: Record) -> dict[str, list[float]]:
    if not record.ok:
        return {}
    found = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    single = {measure: [value] for measure, value in found.items() if not math.isnan(value)}
    return single | {"itl": record.itls}


def _keeps_slo(record: Record, slo: Slo) -> bool:
    # An answer of one token has no TPOT, so it cannot miss the SLO for TPOT.
    return record.ok and record.ttft <= slo.ttft and not record.tpot > slo.tpot


def _seconds(run: Run, warmup: float) -> float:
    ends = [r.ended for r in run.records if r.scheduled >= warmup and not math.isnan(r.ended)]
    return max(max(ends, default=warmup) - warmup, 1e-3)
