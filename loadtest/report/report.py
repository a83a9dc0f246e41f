"""Writes one self-contained HTML page about runs, and the same numbers as JSON.

The page loads no script, font or picture from elsewhere. It begins with the verdict: whether the
runs are valid.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import jinja2

from loadtest.errors import LoadTestError
from loadtest.report import plots
from loadtest.report.capacity import GOOD_ENOUGH, Capacity, capacities
from loadtest.report.comparison import ENOUGH_STARTS, Comparison, compare
from loadtest.report.conclusion import conclusion, failures, judged, limits
from loadtest.report.gate import worse
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns, Summary, group_runs, summarize
from loadtest.runs.guidellm import read_guidellm
from loadtest.runs.records import kind
from loadtest.runs.run import Run, load_run
from vllm_gac.checkpoint.atomic_files import write_text

# Fewer blocks than this have intervals that are too wide to decide by.
_FEW_BLOCKS = 9
_WITHIN = 0.05  # what a ratio should be known within
_FROZEN = 0.1  # seconds
_SIDE_BY_SIDE = (
    "Under the same requests, the servers of a repeat ran at the same time, as far as there were "
    "GPUs, each alone on its own with its whole cache and client processes of its own. From repeat "
    "to repeat they change places, so neither the hour nor the GPU favours one."
)
_IN_TURN = (
    "Under the same requests, the servers of a repeat ran one after the other, each alone with its "
    "whole cache. From repeat to repeat another one begins, so the hour favours none."
)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options of the command line; `margin` and `these_starts` are as in gate.py."""

    title: str = "Load test"
    baseline: str | None = None
    margin: float | None = None
    these_starts: bool = False


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
    left_out: list[Run] = dataclasses.field(default_factory=list)
    worse: list[str] = dataclasses.field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The servers, in order of first appearance."""
        return list(dict.fromkeys(run.info["label"] for run in self.runs))

    @property
    def conclusion(self) -> list[str]:
        """What the runs show, a line each; nothing if no run is valid."""
        if not self.valid:
            return ["No run is valid, so nothing is concluded"]
        return conclusion(self.groups, self.summaries, self.comparisons, self.capacities)

    @property
    def fairness(self) -> str:
        """What makes the servers of one `ab` comparable; empty if it started not all of them."""
        how = {run.info.get("side_by_side") for run in self.runs}
        if not self.comparisons or len(how) > 1 or None in how:
            return ""
        if True in how:
            return _SIDE_BY_SIDE
        # Those of several `ab`, side by side, did not run one after the other.
        return "" if self._overlap() else _IN_TURN

    def _overlap(self) -> bool:
        """Whether a run began before another had ended."""
        spans = sorted(
            (run.info["start_at"], run.info["start_at"] + (run.info.get("window") or [0, 0])[1])
            for run in self.runs
        )
        return any(end > begin for (_, end), (begin, _) in pairwise(spans))

    @property
    def valid(self) -> bool:
        """Whether every run that counts is valid."""
        return all(run.verdict.valid for run in self.runs)


def write_report(directories: Sequence[Path], out: Path, options: ReportOptions) -> Report:
    """Write `out` (.html), and .json beside it.

    Raises LoadTestError if `out` is not .html, the baseline has no run, or a run cannot be read or
    is given twice.
    """
    if out.suffix != ".html":
        raise LoadTestError(f"{out}: expected a name that ends in .html")
    where = [path.resolve() for path in directories]
    if twice := [path for path in where if where.count(path) > 1]:
        raise LoadTestError(f"{twice[0]}: this run is given twice; name it once")
    runs = [
        run
        for path in directories
        for run in (read_guidellm(path) if path.suffix == ".json" else [load_run(path)])
    ]
    report = build_report(runs, options)
    page = _render(report)
    content = json.dumps(_as_json(report), indent=1, allow_nan=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out.with_suffix(".json"), content + "\n")
    write_text(out, page)
    return report


def build_report(runs: Sequence[Run], options: ReportOptions) -> Report:
    """Compute the numbers of the page. Raises LoadTestError if the baseline has no run.

    An INVALID run says nothing about its server, so it is left out, unless no run is valid.
    """
    valid = [run for run in runs if run.verdict.valid]
    left_out = [run for run in runs if not run.verdict.valid] if valid else []
    runs = valid or list(runs)
    groups = group_runs(runs)
    summaries = [summarize(group) for group in groups]
    # A baseline none of whose runs counts is no typing error of the caller.
    gone = {run.info["label"] for run in left_out} - {group.label for group in groups}
    comparisons = []
    if options.baseline is not None and options.baseline not in gone:
        comparisons = compare(groups, options.baseline)
    return Report(
        title=options.title,
        groups=groups,
        summaries=summaries,
        comparisons=comparisons,
        capacities=capacities(groups),
        runs=runs,
        left_out=left_out,
        notes=_notes(groups, summaries, comparisons),
        worse=worse(
            [*runs, *left_out],
            [group for group in groups if all(run.verdict.valid for run in group.runs)],
            comparisons,
            options.baseline,
            options.margin,
            options.these_starts,
        ),
    )


def _notes(
    groups: Sequence[PooledRuns], summaries: Sequence[Summary], comparisons: Sequence[Comparison]
) -> list[str]:
    """Notes on what a careful reader would ask about. Each names the runs that it concerns."""
    concerned: dict[str, list[str]] = {}
    many = len({group.traffic for group in groups}) > 1
    for group, summary in zip(groups, summaries, strict=True):
        for note in _notes_on(group, summary):
            at = f"{group.rate:g}/s" + (f" of {group.traffic}" if many else "")
            concerned.setdefault(note, []).append(f"{group.label} at {at}")
    for c in comparisons:
        for note in _notes_on_comparison(c):
            at = f"{c.rate:g}/s" + (f" of {c.traffic}" if many else "")
            concerned.setdefault(note, []).append(f"{c.label} over {c.baseline} at {at}")
    return [
        f"{'All' if len(names) == len(groups) else ', '.join(names)}: {note}"
        for note, names in concerned.items()
    ]


def _notes_on_comparison(comparison: Comparison) -> Iterator[str]:
    if comparison.left_out and comparison.paired:
        yield (
            f"{comparison.left_out} runs have no partner under the same schedule, such as where "
            "that is INVALID, and are not compared."
        )
    known = comparison.speedup["tpot"][50.0].relative
    if comparison.starts > 1 and _WITHIN < known < math.inf:
        starts = math.ceil(comparison.starts * (known / _WITHIN) ** 2)
        yield (
            f"time per token p50 is known within {known:.0%}; within {_WITHIN:.0%} takes some "
            f"{starts} starts."
        )


def _notes_on(group: PooledRuns, summary: Summary) -> Iterator[str]:
    yield from dict.fromkeys(note for run in group.runs for note in run.schedule.notes)
    if len(set(group.schedules)) < len(group.runs):
        yield (
            "repeats of one schedule: intervals leave out what another draw of lengths and "
            "arrivals would change. Give each repeat a --seed of its own."
        )
    if group.blocks < _FEW_BLOCKS and len(set(group.starts_of_runs)) == 1:
        yield (
            f"one start of {group.blocks} independent blocks of time: intervals are wide or have "
            "no end. Run longer, or more starts."
        )
    if group.memory * 4 > min(end - begin for begin, end in group.windows):
        yield (
            f"the server's load at one moment still shows {group.memory:.0f} s later, so runs are "
            "too short at this rate: it may not have been in a steady state."
        )
    machines = {
        (str(r.info.get("hardware")), str(r.info.get("server_version"))) for r in group.runs
    }
    if len(machines) > 1:
        yield "pooled from different machines or versions of the server."
    frozen = max((p.wake_max for run in group.runs for p in run.processes), default=0.0)
    if frozen > _FROZEN:
        yield (
            f"the client was once not awake for {frozen * 1e3:.0f} ms: maxima and the 99.9th "
            "percentile may be the client's."
        )
    answered = [record for record in group.records if record.ok and not record.cancelled]
    short = sum(record.output_length not in (0, record.output_tokens) for record in answered)
    if short:
        yield f"{short} of {len(answered)} answers were not of the scheduled length."
    prompts = sum(r.prompt_tokens not in (None, r.input_length) for r in answered)
    if prompts:
        yield (
            f"{prompts} of {len(answered)} prompts were not of the scheduled length by the "
            "server's count (chat templates and text prompts add or merge tokens)."
        )
    uncounted = sum(not record.is_counted for record in answered)
    if uncounted:
        yield (
            f"of {uncounted} of {len(answered)} answers the server did not tell how many tokens "
            "they have (no `usage`), and an event may have several: they have no TPOT, count as "
            "within its SLO, and have as many tokens an event as other answers; without any, "
            "tokens per second are not known."
        )
    if 0 < summary.tokens_per_event < 0.95:
        yield (
            f"{1 / summary.tokens_per_event:.2f} streamed events per token: somebody sends chunks "
            "twice or cuts them. ITL and the worst gap are of events; TPOT is per token."
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
    formats = {"ms": lambda seconds: _number(seconds * 1e3), "number": _number, "count": _count}
    environment.filters.update(formats)
    environment.globals.update(formats)
    pairs = zip(report.groups, report.summaries, strict=True)  # sorted by traffic and rate
    sections = []
    for _, members in groupby(pairs, key=lambda pair: (pair[0].traffic, pair[0].rate)):
        rows = list(members)
        first, errors = rows[0][0], _errors([group for group, _ in rows])
        traffic = first.runs[0].schedule.traffic
        sections.append({"rate": first.rate, "traffic": traffic, "rows": rows, "errors": errors})
    page: str = environment.get_template("report.html.j2").render(
        report=report,
        sections=sections,
        limits=limits,
        many=len({group.traffic for group in report.groups}) > 1,
        percents=PERCENTS,
        measures=MEASURES,
        good_enough=GOOD_ENOUGH,
        judged=judged,
        whiskers=plots.ratio_whiskers(report.comparisons, report.labels)
        if report.comparisons
        else "",
        enough=ENOUGH_STARTS,
    )
    return page


def _errors(groups: Sequence[PooledRuns]) -> list[tuple[str, str, int]]:
    """(server, an example, how often) of each kind of error, the most frequent first."""
    failed = [(g.label, r.error) for g in groups for r in g.records if r.error is not None]
    counts = Counter((label, kind(error)) for label, error in failed)
    examples = {(label, kind(error)): error for label, error in failed}
    return [(key[0], examples[key], count) for key, count in counts.most_common(20)]


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "title": report.title,
        "valid": report.valid,
        "conclusion": " ".join(f"{line}." for line in report.conclusion),
        "fairness": report.fairness,
        "fails": {
            "invalid": [
                f"{run.directory.name} is INVALID: {run.verdict.reasons[0]}"
                for run in (*report.runs, *report.left_out)
                if not run.verdict.valid
            ],
            "failed": failures(report.groups, report.summaries),
            "worse": report.worse,
        },
        "notes": report.notes,
        "groups": [
            {
                "label": group.label,
                "traffic": group.traffic,
                "rate": group.rate,
                "schedules_sha256": list(group.schedules),
                "repeats": len(group.runs),
                "seconds": group.seconds,
                "gpus": group.gpus,
                "slo": group.slo.model_dump(),
                "memory_seconds": group.memory,
                "block_seconds": group.block,
                "blocks": group.blocks,
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
                "health": [_plain(dataclasses.asdict(p)) for p in run.processes],
                "traffic": run.schedule.traffic,
                **run.info,
            }
            for run in (*report.runs, *report.left_out)
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


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _number(value: float) -> str:
    """The larger the number, the fewer digits after the point."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"  # noqa: RUF001
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
