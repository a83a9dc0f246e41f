"""`vllm-gac profile`: measure kernels on this machine's GPU."""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json
from vllm_gac.errors import GacError, ProfileError

if TYPE_CHECKING:
    from vllm_gac.gpu.profile import GpuProfile


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "profile",
        help="measure this machine's GPU, for --gpu of the other verbs",
        description="Measure how long this machine's GPU takes for linears, whole and low rank, "
        "and attention of every size, in bf16, FP8 and W4A16, and write it down. Takes minutes, "
        "during which nothing else should run on the GPU.",
    )
    out = "where to write it (profile.json)"
    options.add_path(parser, "--out", "PROFILE.json", out, default=Path("profile.json"))
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what PROFILE.json lacks, and save after each part, the most important "
        "parts first: for a profile of before FP8 times, or where time is short",
    )
    options.add_quiet(parser)
    options.add_json(parser)
    parser.set_defaults(run=run, hint="; nothing was written")


def run(args: argparse.Namespace) -> int:
    """Write the profile. Print its path and the GPU's two ceilings."""
    if args.out.suffix != ".json":
        raise ProfileError(f"--out {args.out}: a profile is found by its name ending in .json")
    if not args.out.absolute().parent.is_dir():
        raise ProfileError(f"--out {args.out}: its directory does not exist; make it first")

    from vllm_gac.gpu.profile_files import write_profile

    _require_gpu()
    from vllm_gac.profiling.profile import measure_profile

    if args.resume:
        args.hint = "; the same command goes on from here"
    save = partial(write_profile, args.out)
    if os.path.lexists(args.out) and not args.resume:
        raise ProfileError(f"{args.out}: exists; remove it, or measure what it lacks with --resume")
    profile = measure_profile(
        _before(args.out) if args.resume else None,
        save if args.resume else lambda profile: None,
        progress=options.shows_progress(args),
    )
    save(profile)
    assert profile.ceilings
    bandwidth, peak = profile.ceilings.terabytes_per_second, profile.ceilings.teraflops
    if args.json:
        summary = {"gpu": profile.gpu, "terabytes_per_second": bandwidth, "teraflops": peak}
        print_json({"out": str(args.out)} | summary)
    else:
        print(
            f"wrote {args.out}: {profile.gpu}, {bandwidth:.2f} TB/s, {peak:.0f} TFLOP/s; use it "
            f"with: vllm-gac plan MODEL --align measured --gpu {args.out} ..."
        )
    return 0


def _require_gpu() -> None:
    """Raise ProfileError unless PyTorch sees a CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ProfileError(
            f"PyTorch {torch.__version__} sees no CUDA GPU to measure; run this on the machine "
            "that will serve, or plan with a shipped profile: --gpu h200"
        )


def _before(out: Path) -> "GpuProfile | None":
    """The profile at `out`; None if nothing is there.

    Raises:
        ProfileError: If something else is there, or a profile of another GPU.
    """
    import torch

    from vllm_gac.checkpoint.untrusted_files import read_json
    from vllm_gac.gpu.profile import GpuProfile
    from vllm_gac.layout.schema import validate

    if not os.path.lexists(out):
        return None
    try:
        profile = validate(GpuProfile, read_json(out, ProfileError), str(out), ProfileError)
    except GacError as e:
        raise ProfileError(f"{e}; choose another --out, or remove it") from e
    if profile.gpu != (gpu := torch.cuda.get_device_name()):
        raise ProfileError(
            f"{out}: the profile is of {profile.gpu}, and this GPU is {gpu}; measure it into "
            "another file"
        )
    return profile
