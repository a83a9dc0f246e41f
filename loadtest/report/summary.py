"""The numbers of a report: latencies, throughput and goodput of each server at each rate.

Runs with the same label, traffic and rate are repeats, and they are pooled; each has a schedule of
its own. What counts is what was due in the *window* of a run: that of its step, or else until the
traffic ends. Failures are results: a request that failed has infinite latency. Otherwise a server
that refuses half of its requests would look fast.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.report.blocks import Blocks, block_seconds, memory
from loadtest.report.intervals import (
    Estimate,
    Floats,
    Ints,
    Samples,
    ascending,
    percentile,
    proportion,
    rate,
)
from loadtest.runs.records import Record
from loadtest.runs.run import Run
from loadtest.traffic.scenario import Slo

MEASURES = ("ttft", "tpot", "itl", "gap", "e2e")
PERCENTS = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class PooledRuns:
    """All repeats of one server under one kind of traffic at one rate.

    Attributes:
        label: the server.
        rate: requests per second that the scenario asks for.
        runs: the repeats.
        windows: what counts of each, in seconds of the run.
        slo: what a request must meet.
        memory: the autocorrelation time of the state of the servers at this rate, in seconds.
        run_blocks: the blocks of each repeat.
        samples: latencies in seconds, by measure.
        kept_slo: 1.0 for each request that kept the SLO, 0.0 for the others.
    """

    label: str
    rate: float
    runs: tuple[Run, ...]
    windows: tuple[tuple[float, float], ...]
    slo: Slo
    memory: float
    run_blocks: tuple[Blocks, ...]
    samples: dict[str, Samples]
    kept_slo: Samples

    @property
    def traffic(self) -> str:
        """The scenario's name."""
        return traffic_of(self.runs[0])

    @property
    def schedules(self) -> tuple[str, ...]:
        """SHA-256 of each repeat's schedule."""
        return tuple(str(run.info["schedule_sha256"]) for run in self.runs)

    def start_of(self, number: int) -> str:
        """The start of the server of a repeat. Repeats that do not say are taken for one's."""
        return str(self.runs[number].info.get("start"))

    def traffic_of(self, number: int) -> tuple[str, float]:
        """What a repeat has in common with those of other servers: its schedule, what counts."""
        begin, end = self.windows[number]
        return self.schedules[number], round(end - begin, 3)

    @property
    def starts_of_runs(self) -> list[str]:
        """The start of the server of each repeat."""
        return [self.start_of(number) for number in range(len(self.runs))]

    @property
    def answered_length(self) -> float:
        """Tokens of whole answers for each that was scheduled; NaN if nobody knows.

        Of each whole answer where nobody knows how many were scheduled (0, of guidellm).
        """
        whole = [r for r in self.records if r.ok and not r.cancelled]
        per_event = tokens_per_event(self.records)
        scheduled = sum(r.output_length or 1 for r in whole)
        return sum(tokens_of(r, per_event) for r in whole) / scheduled if whole else math.nan

    @property
    def block_starts(self) -> Ints:
        """[blocks], the number of the start of the server that each block is of."""
        seen = list(dict.fromkeys(self.starts_of_runs))
        numbers = [seen.index(start) for start in self.starts_of_runs]
        return np.repeat(numbers, [blocks.count for blocks in self.run_blocks])

    @property
    def seconds(self) -> float:
        """The length of all windows together."""
        return sum(end - begin for begin, end in self.windows)

    @property
    def blocks(self) -> int:
        """How many blocks there are, over all repeats."""
        return sum(blocks.count for blocks in self.run_blocks)

    @property
    def block_lengths(self) -> Floats:
        """[blocks], the seconds of each block of all repeats."""
        widths = [blocks.width for blocks in self.run_blocks]
        return np.repeat(widths, [blocks.count for blocks in self.run_blocks])

    @property
    def block(self) -> float:
        """The mean length of a block in seconds."""
        return float(self.block_lengths.mean())

    @property
    def gpus(self) -> int:
        """How many GPUs the server has."""
        return int(self.runs[0].info.get("gpus", 1))

    @property
    def records(self) -> list[Record]:
        """The records of all repeats that were due in their windows."""
        return [r for i in range(len(self.runs)) for r in self.records_of(i)]

    def records_of(self, number: int) -> list[Record]:
        """The records of one repeat that were due in its window."""
        begin, end = self.windows[number]
        return [r for r in self.runs[number].records if begin <= r.scheduled < end]


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies in seconds by measure and percentile; rates per second.

    Attributes:
        latency: by measure and percentile. A measure's `worst` is its largest value.
        requests: that were due in the windows.
        failed: those of them that failed or were refused.
        cancelled: those of them that the end of the client cut off.
        offered: requests per second that were sent.
        requests_per_second: answers that ended.
        output_tokens_per_second, input_tokens_per_second: tokens of answers and of their prompts.
        good_fraction: of the requests that were due, how many kept the SLO.
        goodput: requests per second that kept the SLO.
        tokens_per_event: output tokens per streamed event.
    """

    latency: dict[str, dict[float, Estimate]]
    worst: dict[str, float]
    requests: int
    failed: int
    cancelled: int
    offered: float
    requests_per_second: Estimate
    output_tokens_per_second: Estimate
    input_tokens_per_second: Estimate
    good_fraction: Estimate
    goodput: Estimate
    tokens_per_event: float


def group_runs(runs: Sequence[Run]) -> list[PooledRuns]:
    """Pool the repeats. Groups are sorted by traffic, then by rate, then by first appearance.

    Raises LoadTestError if a window has no request, or if runs of one traffic and rate, which pool
    or are compared, differ in their scenario.
    """
    _check_alike(runs)
    by_key: dict[tuple[str, float, str], list[Run]] = {}
    for run in runs:
        by_key.setdefault((traffic_of(run), scheduled_rate(run), run.info["label"]), []).append(run)
    windows = {key: [_window(run) for run in members] for key, members in by_key.items()}
    # All servers have the same blocks at a rate, so that they can be compared block by block.
    remembers: dict[tuple[str, float], float] = {}
    for (traffic, at, label), members in by_key.items():
        mine = memory(members, windows[traffic, at, label])
        remembers[traffic, at] = max(mine, remembers.get((traffic, at), 0.0))
    groups = [
        _group(label, at, members, windows[traffic, at, label], remembers[traffic, at])
        for (traffic, at, label), members in by_key.items()
    ]
    kinds = list(dict.fromkeys(group.traffic for group in groups))
    labels = list(dict.fromkeys(group.label for group in groups))
    return sorted(groups, key=lambda g: (kinds.index(g.traffic), g.rate, labels.index(g.label)))


def summarize(group: PooledRuns) -> Summary:
    """The numbers of one group."""
    records = group.records
    answered = [record for record in records if record.ok]
    came = amounts(group)
    starts = group.block_starts
    rates = {name: rate(values, came["seconds"], starts) for name, values in came.items()}
    return Summary(
        latency={
            measure: {p: percentile(samples, p, group.blocks, starts) for p in PERCENTS}
            for measure, samples in group.samples.items()
        },
        worst={
            measure: float(samples.values.max()) if len(samples.values) else math.nan
            for measure, samples in group.samples.items()
        },
        requests=len(records),
        failed=len(records) - len(answered),
        cancelled=sum(record.cancelled for record in records),
        offered=len(records) / group.seconds,
        requests_per_second=rates["ended"],
        output_tokens_per_second=rates["output"],
        input_tokens_per_second=rates["input"],
        good_fraction=proportion(group.kept_slo, group.blocks),
        goodput=rates["good"],
        tokens_per_event=tokens_per_event(records),
    )


def tokens_per_event(records: Sequence[Record]) -> float:
    """Output tokens per streamed event, of answers whose tokens are known; NaN if none is."""
    known = [r for r in records if r.ok and r.is_counted]
    events = sum(len(r.tokens) for r in known)
    return sum(r.output_tokens for r in known) / events if events else math.nan


def tokens_of(record: Record, per_event: float) -> float:
    """Output tokens of an answer: those that are known, else as many an event as others have."""
    return record.output_tokens if record.is_counted else len(record.tokens) * per_event


def traffic_of(run: Run) -> str:
    """The name of a run's scenario."""
    return str(run.schedule.traffic.get("scenario", {}).get("name", "replayed trace"))


def scheduled_rate(run: Run) -> float:
    """Requests per second that the schedule asks for."""
    scenario = run.schedule.traffic.get("scenario", {})
    seconds = scenario.get("duration") or max(run.schedule.duration, 1e-3)
    return float(scenario.get("rate") or len(run.schedule.requests) / seconds)


def _window(run: Run) -> tuple[float, float]:
    """What of a run counts. Runs of `ab` say it themselves."""
    scenario = run.schedule.traffic.get("scenario", {})
    whole = (0.0, float(scenario.get("duration") or run.schedule.duration + 1e-3))
    begin, end = run.info.get("window") or whole
    if not any(begin <= r.timestamp / 1000 < end for r in run.schedule.requests):
        raise LoadTestError(
            f"{run.directory}: no request between {begin:g} and {end:g} s, which count; leave the "
            "run out"
        )
    return float(begin), float(end)


def _group(
    label: str,
    at: float,
    runs: Sequence[Run],
    windows: Sequence[tuple[float, float]],
    remembers: float,
) -> PooledRuns:
    slo = Slo.model_validate(runs[0].schedule.traffic.get("scenario", {}).get("slo", {}))
    # The same for all repeats, up to what makes it a whole part of a longer one's window.
    wished = block_seconds(min(end - begin for begin, end in windows), remembers)
    run_blocks: list[Blocks] = []
    values: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    blocks: dict[str, list[int]] = {measure: [] for measure in MEASURES}
    kept_slo: list[float] = []
    request_blocks: list[int] = []
    for run, (begin, end) in zip(runs, windows, strict=True):
        records = [record for record in run.records if begin <= record.scheduled < end]
        count = max(round((end - begin) / wished), 1)
        own = Blocks(begin, (end - begin) / count, sum(b.count for b in run_blocks), count)
        run_blocks.append(own)
        numbers = own.of([r.scheduled for r in records]).tolist()
        for record, number in zip(records, numbers, strict=True):
            kept_slo.append(float(_keeps_slo(record, slo)))
            request_blocks.append(number)
            for measure, latencies in _latencies(record).items():
                if measure in ("itl", "gap") and run.info.get("client"):
                    continue  # a client that does not tell when each token came
                values[measure] += latencies
                blocks[measure] += [number] * len(latencies)
    if not kept_slo:
        begin, end = windows[0]
        raise LoadTestError(
            f"{runs[0].directory}: no request that was due between {begin:g} and {end:g} s has a "
            "record; the client was killed before it wrote one: leave the run out, or run it again"
        )
    return PooledRuns(
        label=label,
        rate=at,
        runs=tuple(runs),
        windows=tuple(windows),
        slo=slo,
        memory=remembers,
        run_blocks=tuple(run_blocks),
        samples={
            measure: ascending(
                Samples(np.array(values[measure]), np.array(blocks[measure], dtype=np.int64))
            )
            for measure in MEASURES
        },
        kept_slo=Samples(np.array(kept_slo), np.array(request_blocks, dtype=np.int64)),
    )


def _check_alike(runs: Sequence[Run]) -> None:
    """Raise LoadTestError if runs of one traffic and rate differ in more than repeats do."""
    firsts: dict[tuple[object, ...], tuple[Run, str]] = {}
    for run in runs:
        scenario: dict[str, Any] = run.schedule.traffic.get("scenario", {})
        kept = sorted((k, v) for k, v in scenario.items() if k not in ("seed", "duration"))
        traffic = traffic_of(run), scheduled_rate(run)
        # Each server may have an endpoint of its own.
        server = *traffic, run.info["label"]
        for key, kind in ((traffic, repr(kept)), (server, str(run.info.get("endpoint")))):
            first, expected = firsts.setdefault(key, (run, kind))
            if kind != expected:
                raise LoadTestError(
                    f"{first.directory}, {run.directory}: the same traffic and rate, but another "
                    "SLO, or other lengths, arrivals or endpoints; report them apart"
                )


def _latencies(record: Record) -> dict[str, list[float]]:
    """The latencies of one request. What never came took forever."""
    if not record.ok:
        missing = max(record.output_length - max(len(record.tokens), 1), 0)
        gaps = [*record.itls, *[math.inf] * missing]
        single = {measure: [math.inf] for measure in ("ttft", "tpot", "gap", "e2e")}
        return single | {"itl": gaps}
    gaps = record.itls
    if not record.tokens:  # its client ended
        return {"ttft": [math.inf]}
    values = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
    values["gap"] = max(gaps, default=math.nan)
    single = {measure: [value] for measure, value in values.items() if not math.isnan(value)}
    return single | {"itl": gaps}


def _keeps_slo(record: Record, slo: Slo) -> bool:
    # An answer of one token has no TPOT, so it cannot miss the SLO for TPOT.
    return record.ok and record.ttft <= slo.ttft and not record.tpot > slo.tpot


def amounts(group: PooledRuns) -> dict[str, Floats]:
    """What came in each block [blocks]: answers and tokens when they came, not when they were due.

    What comes after the window has no part in its throughput; what comes in it has, also if it was
    due before the window or before the run. In a steady state both are equally many.
    """
    totals = {
        name: np.zeros(group.blocks)
        for name in ("ended", "output", "input", "good", "due", "answered")
    }
    totals["seconds"] = group.block_lengths
    per_event = tokens_per_event(group.records)
    for index, (run, blocks) in enumerate(zip(group.runs, group.run_blocks, strict=True)):
        begin, end = group.windows[index]
        due = group.records_of(index)
        good = [r.scheduled for r in due if _keeps_slo(r, group.slo)]
        np.add.at(totals["due"], blocks.of([r.scheduled for r in due]), 1)
        np.add.at(totals["answered"], blocks.of([r.scheduled for r in due if r.ok]), 1)
        np.add.at(totals["good"], blocks.of(good), 1)
        answered = [*run.earlier, *run.records]
        ended = [r for r in answered if r.ok and not r.cancelled and begin <= r.ended < end]
        numbers = blocks.of([r.ended for r in ended])
        np.add.at(totals["ended"], numbers, 1)
        np.add.at(totals["input"], numbers, [r.prompt_tokens or r.input_length for r in ended])
        for record in answered:
            came = np.array(record.tokens)
            came = came[(came >= begin) & (came < end)]
            if len(came):
                whole = record.ok and not record.cancelled
                tokens = tokens_of(record, per_event) if whole else len(record.tokens) * per_event
                np.add.at(totals["output"], blocks.of(came), tokens / len(record.tokens))
    return totals
