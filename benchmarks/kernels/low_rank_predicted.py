"""How well times of low-rank linears are predicted that the fit has not seen.

    python -m benchmarks.kernels.low_rank_predicted --out OUT [--profile h200]  # needs no GPU

Each time of low-rank linears in the profile is predicted four times: by all of the profile, without
the times of its own shape, without the times of its own number of tokens, and without any, which
is two GEMMs for each linear.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import profile_arguments, save, source
from vllm_gac.gpu.latency.linears import Linear, linears_microseconds
from vllm_gac.gpu.profile import GpuProfile, LowRankTime
from vllm_gac.gpu.profile_files import read_profile

COMMAND = "python -m benchmarks.kernels.low_rank_predicted"
# What is known of other times when one is predicted.
WAYS: Mapping[str, Callable[[LowRankTime, LowRankTime], bool]] = {
    "of all": lambda time, other: True,
    "without its shape": lambda time, other: shape(time) != shape(other),
    "without its tokens": lambda time, other: time.tokens != other.tokens,
    "as GEMMs": lambda time, other: False,
}


def main() -> None:
    """Predict, and write both files."""
    args = profile_arguments(__doc__).parse_args()
    profile = read_profile(args.profile)
    if not profile.low_rank:
        raise SystemExit(f"--profile {args.profile}: has no times of low-rank linears")
    result = {
        "command": f"{COMMAND} --profile {args.profile}",
        **source(args.commit),
        "profile": {
            "gpu": profile.gpu,
            "measured": profile.measured,
            "times": profile.sources.get("low_rank", "measured with the rest"),
        },
        "rows": list(rows(profile)),
    }
    text = page(result)
    save(args.out, result, text)
    print(text)


def shape(time: LowRankTime) -> tuple[int, ...]:
    """The sizes of the linears without their ranks."""
    return time.in_size, *time.out_sizes


def rows(profile: GpuProfile) -> Iterator[dict[str, Any]]:
    """Every measured time, and the error of each prediction of it."""
    fewer: dict[tuple[str, object], GpuProfile] = {}
    for time in profile.low_rank:
        row = {**time.model_dump(), "kernel": _uses_kernel(time, profile)}
        for way, known in WAYS.items():
            # A profile is fitted once: those without a shape or a number of tokens are kept.
            left_out = {"without its shape": shape(time), "without its tokens": time.tokens}
            key = (way, left_out.get(way))
            if key not in fewer:
                others = [other for other in profile.low_rank if known(time, other)]
                fewer[key] = profile.model_copy(update={"low_rank": others})
            row[way] = round(_predicted(time, fewer[key]) / time.microseconds - 1, 4)
        yield row


def _uses_kernel(time: LowRankTime, profile: GpuProfile) -> bool:
    """Whether our kernel computes at least one of the factors."""
    gemms = profile.model_copy(update={"low_rank": []})
    return _predicted(time, profile) != _predicted(time, gemms)


def _predicted(time: LowRankTime, profile: GpuProfile) -> float:
    pairs = zip(time.out_sizes, time.ranks, strict=True)
    linears = [Linear(out, time.in_size, rank) for out, rank in pairs]
    return linears_microseconds(time.tokens, linears, profile, is_gated=time.is_gated)


def page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    found, profile = result["rows"], result["profile"]
    ours = [row for row in found if row["kernel"]]
    few = [row for row in ours if row["tokens"] <= 16]
    groups = {
        "all": found,
        "with our kernel": ours,
        "- of these up to 16 tokens": few,
        "- of these more": [row for row in ours if row not in few],
        "- of these without the largest shape": [row for row in ours if not row["is_gated"]],
        "GEMMs alone": [row for row in found if not row["kernel"]],
    }
    return "\n".join(
        [
            "# Low-rank linears, predicted and measured",
            "",
            f"{result['date']}, commit {result['commit']}, `{result['command']}`.",
            f"Profile of {profile['gpu']}, measured {profile['measured']}; times of low-rank "
            f"linears: {profile['times']}.",
            "Errors are predicted / measured - 1: by all times, without those of the same shape, "
            "without those of as many tokens,",
            "and by the GEMMs' times alone. Gate and up are the largest shape by far, and one "
            "token has a kernel of its own:",
            "without their own times, these are extrapolated.",
            "",
            *table(
                ("", "times", *(f"{way}: median, worst" for way in WAYS)),
                ((name, *_summary(group)) for name, group in groups.items() if group),
            ),
            "",
            "## Every time",
            "",
            *table(
                ("out", "in", "ranks", "tokens", "measured, us", "our kernel", *WAYS),
                (
                    (
                        _joined(row["out_sizes"]), row["in_size"], _joined(row["ranks"]),
                        row["tokens"], row["microseconds"], "yes" if row["kernel"] else "no",
                        *(f"{row[way]:+.1%}" for way in WAYS),
                    )
                    for row in found
                ),
            ),
            "",
        ]
    )  # fmt: skip


def _joined(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _summary(group: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield str(len(group))
    for way in WAYS:
        errors = [row[way] for row in group]
        yield f"{statistics.median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


if __name__ == "__main__":
    main()
