"""`vllm-gac repair`: pad a model's dims to aligned ones."""

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json, print_table, serve_hint
from vllm_gac.steps.repair.request import RepairRequest

if TYPE_CHECKING:
    from vllm_gac.steps.repair.report import RepairReport, Size


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "repair",
        help="pad a model's dims to ones that kernels like",
        description="Write the model in MODEL to the new directory DIR with head sizes, MLP widths "
        "and ranks padded with zeros, which changes no logit. vLLM does the same in memory: "
        "--model-loader-extra-config '{\"align\": STRATEGY}', which is minimal by default.",
    )
    options.add_model(parser)
    options.add_out(parser)
    options.add_options(RepairRequest, {"": parser})
    options.add_quiet(parser)
    options.add_resume(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Repair, and print the memory that it costs and the time that it gains."""
    from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
    from vllm_gac.steps.repair.repair import repair
    from vllm_gac.steps.repair.report import repair_report

    request = options.request_of(args, RepairRequest)
    gpu = request.gpu or (DEFAULT_GPU if request.strategy == "measured" else None)
    if gpu is not None:
        read_profile(gpu)  # report a missing profile before the work, not after it
    request = replace(request, gpu=gpu)
    done = repair(
        args.model,
        args.out,
        request,
        revision=args.revision,
        resume=args.resume,
        progress=options.shows_progress(args),
    )
    report = repair_report(done.before, done.after, request)
    if args.json:
        print_json({"out": str(args.out), "strategy": request.strategy, **asdict(report)})
    else:
        _print(args, report)
    return 0


def _print(args: argparse.Namespace, report: "RepairReport") -> None:
    print(f"parameters  {_size(report.parameters)}")
    print(f"KV cache    {_size(report.kv_bytes_per_token)} bytes per token, 16-bit")
    if report.microseconds is not None:
        print(f"time        {_size(report.microseconds)} us a step of the decoder layers")
    if report.changes:
        print()
        print_table(
            ("role", "dim", "repaired", "times", "memory"),
            [
                (
                    change.role,
                    *map(str, (change.before, change.after, change.count)),
                    f"{change.overhead_percent:+.2f} %",
                )
                for change in report.changes
            ],
        )
    print(f"\n{serve_hint(args.out)}")


def _size(size: "Size") -> str:
    return f"{size.before:,.0f} -> {size.after:,.0f} ({size.overhead_percent:+.2f} %)"
