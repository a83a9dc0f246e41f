"""Writes one self-contained HTML page about runs, and the same numbers as JSON and CSV.

The page loads no script, font or picture from elsewhere. It begins with the verdict: whether the
runs are valid.
"""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from loadtest.errors import LoadTestError
from loadtest.report import plots
from loadtest.report.bootstrap import Estimate
from loadtest.report.comparison import Capacity, Comparison, capacities, compare, parse_ideals
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns, Summary, group_runs, summarize
from loadtest.runs.run import Run, load_run

_UNITS = {"ttft": "s", "tpot": "s", "itl": "s", "e2e": "s"}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options of the command line. Times are in seconds; `ideal` is LABEL:PHASE=RATIO."""

    title: str = "Load test"
    baseline: str | None = None
    warmup: float = 0.0
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    ideal: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows."""

    title: str
    groups: list[PooledRuns]
    summaries: list[Summary]
    comparisons: list[Comparison]
    capacities: list[Capacity]
    runs: list[Run]
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        """The servers, in order of first appearance."""
        return list(dict.fromkeys(run.info["label"] for run in self.runs))

    @property
    def valid(self) -> bool:
        """Whether every run is valid."""
        return all(run.verdict.valid for run in self.runs)


def write_report(directories: Sequence[Path], out: Path, options: ReportOptions) -> Report:
    """Write `out` (.html), and .json and .csv beside it.

    Raises LoadTestError if `out` is not .html or a run cannot be read.
    """
    if out.suffix != ".html":
        raise LoadTestError(f"{out}: expected a name that ends in .html")
    report = build_report([load_run(directory) for directory in directories], options)
    page = _render(report)
    content = json.dumps(_as_json(report), indent=1, allow_nan=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    out.with_suffix(".json").write_text(content + "\n", encoding="utf-8")
    out.with_suffix(".csv").write_text(_as_csv(report), encoding="utf-8")
    return report


def build_report(runs: Sequence[Run], options: ReportOptions) -> Report:
    """Compute the numbers of the page."""
    groups = group_runs(runs, options.warmup, options.slo_ttft, options.slo_tpot)
    for group in groups:
        if not any(record.ok for record in group.records):
            raise LoadTestError(
                f"{group.runs[0].directory}: no request was answered after the warm-up of "
                f"{options.warmup:g} s"
                + "".join(f"; the first error: {r.error}" for r in group.records[:1])
            )
    summaries = [summarize(group) for group in groups]
    ideals = parse_ideals(options.ideal)
    if ideals and options.baseline is None:
        raise LoadTestError("--ideal needs --baseline: speedup over which server?")
    comparisons = compare(groups, options.baseline, ideals) if options.baseline else []
    return Report(
        title=options.title,
        groups=groups,
        summaries=summaries,
        comparisons=comparisons,
        capacities=capacities(groups, summaries),
        runs=list(runs),
        notes=_notes(groups, summaries),
    )


def _notes(groups: Sequence[PooledRuns], summaries: Sequence[Summary]) -> list[str]:
    """Notes on what a careful reader would ask about. Each names the runs that it concerns."""
    concerned: dict[str, list[str]] = {}
    many = len({group.traffic for group in groups}) > 1
    for group, summary in zip(groups, summaries, strict=True):
        for note in _notes_on(group, summary, alone=len({g.label for g in groups}) == 1):
            at = f"{group.rate:g}/s" + (f" of {group.traffic}" if many else "")
            concerned.setdefault(note, []).append(f"{group.label} at {at}")
    return [
        f"{'All' if len(names) == len(groups) else ', '.join(names)}: {note}"
        for note, names in concerned.items()
    ]


def _notes_on(group: PooledRuns, summary: Summary, alone: bool) -> Iterator[str]:
    if len(group.runs) < 3 and not alone:
        yield "fewer than three repeats; a comparison wants three or more."
    if group.block < 10:
        yield (
            f"short runs, so bootstrap blocks are {group.block:.1f} s instead of 10 s and "
            "intervals may be too narrow."
        )
    answered = [record for record in group.records if record.ok]
    short = sum(record.output_tokens != record.output_length for record in answered)
    if short:
        yield f"{short} of {len(answered)} answers were not of the scheduled length."
    prompts = sum(r.prompt_tokens not in (None, r.input_length) for r in answered)
    if prompts:
        yield (
            f"{prompts} of {len(answered)} prompts were not of the scheduled length by the "
            "server's count (chat templates and text prompts add or merge tokens)."
        )
    if summary.tokens_per_event > 1.05:
        yield (
            f"{summary.tokens_per_event:.2f} tokens per streamed event, so ITL is the gap between "
            "events; TPOT is per token."
        )


def _render(report: Report) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = {"ms": _ms, "ratio": _ratio, "number": _number, "count": _count}
    environment.filters.update(formats)
    environment.globals.update(formats)
    rates = []
    for schedule in dict.fromkeys(group.schedule for group in report.groups):
        rows = [
            (group, summary)
            for group, summary in zip(report.groups, report.summaries, strict=True)
            if group.schedule == schedule
        ]
        members = [group for group, _ in rows]
        rates.append(
            {
                "rate": members[0].rate,
                "traffic": members[0].runs[0].schedule.traffic,
                "rows": rows,
                "cdfs": plots.latency_cdfs(members, report.labels),
                "timeline": plots.timeline(members, report.labels),
                "errors": _errors(members),
            }
        )
    page: str = environment.get_template("report.html.j2").render(
        report=report,
        rates=rates,
        over_rate=_over_rate(report),
        many=len({group.traffic for group in report.groups}) > 1,
        percents=PERCENTS,
        measures=MEASURES,
    )
    return page


def _over_rate(report: Report) -> list[tuple[str, str, list[Capacity]]]:
    """(traffic, plot, capacities) for each kind of traffic that was sent at more than one rate."""
    found = []
    for traffic in dict.fromkeys(group.traffic for group in report.groups):
        pairs = [
            (group, summary)
            for group, summary in zip(report.groups, report.summaries, strict=True)
            if group.traffic == traffic
        ]
        groups, summaries = [group for group, _ in pairs], [summary for _, summary in pairs]
        if len({group.rate for group in groups}) > 1:
            labels = [label for label in report.labels if label in {g.label for g in groups}]
            plot = plots.latency_over_rate(groups, summaries, labels)
            kept = [c for c in report.capacities if c.traffic == traffic]
            found.append((traffic, plot, kept))
    return found


def _errors(groups: Sequence[PooledRuns]) -> list[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = {}
    for group in groups:
        for record in group.records:
            if record.error is not None:
                key = (group.label, record.error)
                counts[key] = counts.get(key, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:20]
    return [(label, error, count) for (label, error), count in most]


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "title": report.title,
        "valid": report.valid,
        "notes": report.notes,
        "groups": [
            {
                "label": group.label,
                "traffic": group.traffic,
                "rate": group.rate,
                "schedule_sha256": group.schedule,
                "repeats": len(group.runs),
                "slo": group.slo.model_dump(),
                "bootstrap_block_seconds": group.block,
                **_plain(dataclasses.asdict(summary)),
            }
            for group, summary in zip(report.groups, report.summaries, strict=True)
        ],
        "comparisons": [_plain(dataclasses.asdict(c)) for c in report.comparisons],
        "capacities": [_plain(dataclasses.asdict(c)) for c in report.capacities],
        "runs": [
            {
                "directory": run.directory.name,
                "valid": run.verdict.valid,
                "reasons": list(run.verdict.reasons),
                "server": run.server,
                "lag_p99": _plain(run.verdict.lag_p99),
                "processes": [_plain(dataclasses.asdict(p)) for p in run.processes],
                "traffic": run.schedule.traffic,
                **run.info,
            }
            for run in report.runs
        ],
    }


def _plain(value: Any) -> Any:
    """Turn a value into JSON's types: NaN and infinity become null, percentiles become "p50"."""
    if isinstance(value, dict):
        return {
            f"p{key:g}" if isinstance(key, float) else key: _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _as_csv(report: Report) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["label", "traffic", "rate", "measure", "statistic", "value", "low", "high", "unit"]
    )
    for group, summary in zip(report.groups, report.summaries, strict=True):
        start = [group.label, group.traffic, f"{group.rate:g}"]
        for measure, estimates in summary.latency.items():
            for percent, e in estimates.items():
                row = [measure, f"p{percent:g}", *_cells(e), _UNITS[measure]]
                writer.writerow([*start, *row])
        writer.writerow([*start, "good", "fraction", *_cells(summary.good_fraction), ""])
        for name, unit in (
            ("goodput", "1/s"),
            ("requests_per_second", "1/s"),
            ("output_tokens_per_second", "1/s"),
            ("input_tokens_per_second", "1/s"),
            ("requests", ""),
            ("failed", ""),
        ):
            writer.writerow([*start, name, "total", f"{getattr(summary, name):.6g}", "", "", unit])
    return buffer.getvalue()


def _cells(estimate: Estimate) -> list[str]:
    return [
        f"{number:.6g}" if math.isfinite(number) else ""
        for number in (estimate.value, estimate.low, estimate.high)
    ]


def _ms(seconds: float) -> str:
    """Milliseconds to three significant digits."""
    return _number(seconds * 1e3)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"  # noqa: RUF001


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"  # noqa: RUF001
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
