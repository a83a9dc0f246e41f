"""Measure how fast OpenAI-compatible servers answer traffic drawn from recorded distributions."""

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from pathlib import Path

from loadtest.errors import LoadTestError
from vllm_gac.errors import GacError


def main(arguments: list[str] | None = None) -> int:
    """Run one step. Returns the exit status: 0 if the step succeeded, else 1."""
    options = _parser().parse_args(arguments)
    try:
        options.step(options)
    except GacError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # e.g. a missing directory or a taken port
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    steps = parser.add_subparsers(required=True)

    schedule = steps.add_parser("schedule", help="write the schedule of a scenario")
    schedule.add_argument("scenario", help="a .yaml file, or the name of a shipped scenario")
    schedule.add_argument("out", type=Path, help="the schedule to write (.jsonl), a new file")
    schedule.add_argument("--rate", type=float, help="mean requests per second")
    schedule.add_argument("--duration", type=float, help="seconds")
    schedule.add_argument("--seed", type=int)
    schedule.add_argument("--max-model-len", type=int, help="cut longer requests to this")
    schedule.set_defaults(step=_schedule)

    report = steps.add_parser("report", help="one report of one or many runs")
    report.add_argument(
        "out",
        type=Path,
        help="the report (.html; .json beside it); an older one is replaced",
    )
    report.add_argument(
        "runs", type=Path, nargs="+", help="directories of runs, or .json files of guidellm"
    )
    report.add_argument("--title", default="Load test")
    report.add_argument("--baseline", help="label of the runs that others are compared with")
    _add_fail_on(report)
    report.set_defaults(step=_report)

    ab = steps.add_parser("ab", help="runs of several servers in turn, and their report")
    ab.add_argument("comparison", type=Path, help="a .yaml file, as in comparisons/")
    ab.add_argument("out", type=Path, help="directory for the runs and report.html")
    ab.add_argument("--repeats", type=int, help="how often (default: what the file says)")
    ab.add_argument(
        "--part", type=int, default=1, help="number of this part of a measurement in parts"
    )
    ab.add_argument(
        "--traffic",
        action="append",
        metavar="NAME",
        help="only this traffic of the file; may be given more than once",
    )
    ab.add_argument(
        "--start",
        metavar="NAME",
        help="names the start of servers that run elsewhere (default: what their metrics tell)",
    )
    ab.add_argument(
        "--side-by-side",
        action="store_true",
        help="servers of a repeat at the same time, each on GPUs of its own, as far as there are",
    )
    ab.add_argument("--dry-run", action="store_true", help="only say what would run, and how long")
    _add_fail_on(ab)
    ab.set_defaults(step=_ab)

    mock = steps.add_parser("mock", help="serve a mock that answers on the dot, on 127.0.0.1")
    mock.add_argument("--port", type=int, default=8000)
    mock.add_argument("--itl", type=float, default=0.02, help="seconds between tokens")
    mock.set_defaults(step=_mock)
    return parser


def _add_fail_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on",
        action="append",
        choices=["invalid", "failed", "worse"],
        default=[],
        help="exit with 1 after the report if a run is INVALID, a request failed, or a server is "
        "surely worse than the baseline in anything, or whether it is cannot be told; may be given "
        "more than once",
    )
    parser.add_argument(
        "--margin",
        type=_fraction,
        help="with --fail-on worse: fail unless servers are surely not worse by more, such as 5%%",
    )
    parser.add_argument(
        "--these-starts",
        action="store_true",
        help="with --fail-on worse: a verdict of the starts that there are is enough, even of one",
    )


def _fraction(text: str) -> float:
    """ "5%" or "0.05" -> 0.05."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value < 1:
        raise ValueError(text)
    return value


def _check_gate(options: argparse.Namespace) -> None:
    if "worse" not in options.fail_on and (options.margin is not None or options.these_starts):
        option = "--these-starts" if options.margin is None else "--margin"
        raise LoadTestError(f"{option} needs --fail-on worse, which it changes")


def _schedule(options: argparse.Namespace) -> None:
    from loadtest.traffic.generate import generate
    from loadtest.traffic.scenario import Scenario, find_scenario, load_yaml
    from loadtest.traffic.schedule import traffic_file, write_schedule

    # Another server may still be measured under it.
    for path in (options.out, traffic_file(options.out)):
        if os.path.lexists(path):
            raise LoadTestError(f"{path}: exists already; remove it, or name another schedule")
    scenario = load_yaml(
        find_scenario(options.scenario),
        Scenario,
        rate=options.rate,
        duration=options.duration,
        seed=options.seed,
        max_model_len=options.max_model_len,
    )
    schedule = generate(scenario)
    write_schedule(schedule, options.out)
    about = schedule.traffic
    print(
        f"{options.out}: {about['requests']} requests in {scenario.duration:g} s, "
        f"{about['input_length']['mean']:.0f} tokens in and "
        f"{about['output_length']['mean']:.0f} out on average, "
        f"{about['truncated_fraction']:.1%} cut to the context"
    )


def _report(options: argparse.Namespace) -> None:
    from loadtest.report.report import ReportOptions, write_report

    _check_gate(options)
    how = ReportOptions(options.title, options.baseline, options.margin, options.these_starts)
    write_report(options.runs, options.out, how)
    print(f"{options.out}, {options.out.with_suffix('.json')}")
    _fail_on(options.fail_on, options.out)


def _ab(options: argparse.Namespace) -> None:
    from loadtest.ab.ab import run_comparison
    from loadtest.ab.comparison_file import load_comparison
    from loadtest.ab.progress import prediction

    _check_gate(options)
    # SIGTERM exits as Ctrl-C does, so that the clean-up stops the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.part < 1:
        raise LoadTestError(f"--part {options.part}: parts count from 1")
    comparison = load_comparison(
        options.comparison,
        repeats=options.repeats,
        side_by_side=options.side_by_side or None,
        start=options.start,
    )
    if options.traffic is not None:
        there = {traffic.name: traffic for traffic in comparison.traffic}
        if unknown := [name for name in options.traffic if name not in there]:
            raise LoadTestError(f"--traffic {unknown[0]}: the file has {', '.join(there)}")
        chosen = [there[name] for name in dict.fromkeys(options.traffic)]
        comparison = comparison.model_copy(update={"traffic": chosen})
    if options.dry_run:
        print(prediction(comparison))
        return
    gate = {"margin": options.margin, "these_starts": options.these_starts}
    report = run_comparison(comparison, options.out, options.part, **gate)
    print(report)
    _fail_on(options.fail_on, report)


def _fail_on(kinds: list[str], report: Path) -> None:
    fails = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))["fails"]
    if faults := [fault for kind in dict.fromkeys(kinds) for fault in fails[kind]]:
        raise LoadTestError(f"--fail-on: {'; '.join(faults)}")


def _mock(options: argparse.Namespace) -> None:
    if not 0 <= options.port <= 65535:
        raise LoadTestError(f"--port {options.port}: expected 0 (any free one) to 65535")
    if not 0 <= options.itl < math.inf:
        raise LoadTestError(f"--itl {options.itl:g}: expected seconds, 0 or more")
    asyncio.run(_serve_mock(options))


async def _serve_mock(options: argparse.Namespace) -> None:
    from loadtest.mock_server import Mock, Timing

    mock = Mock(Timing(itl=options.itl))
    server = await mock.serve("127.0.0.1", options.port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
