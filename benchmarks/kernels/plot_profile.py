"""Plots the times of a profile, which show the staircases of alignment.

python -m benchmarks.kernels.plot_profile [--profile PROFILE.json] [--out FIGURE.svg]
"""

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    axes_grid,
    by_alignment,
    drawn,
)
from vllm_gac.gpu.profile import GpuProfile, Sweep
from vllm_gac.gpu.profile_files import read_profile

_BATCHES = ((1, BLUE), (64, SKY), (256, GREEN), (1024, ORANGE), (8192, PINK))


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="h200", help="name or path (h200)")
    out = Path("benchmarks/results/profile_h200.svg")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    _, svg = drawn(_draw, read_profile(options.profile))
    options.out.write_text(svg)


def _draw(profile: GpuProfile) -> tuple[str, Figure]:
    figure, axes = axes_grid(11, 9.5, 3, 2)
    figure.suptitle(f"{profile.gpu}, {profile.measured}: multiples of 8 blue, others red")
    _staircase(axes[0], profile, "n")
    _staircase(axes[1], profile, "k")
    _heads(axes[2], profile)
    _decode(axes[3], profile)
    _linears(axes[4], profile, "n")
    _linears(axes[5], profile, "k")
    return "", figure


def _staircase(axes: Axes, profile: GpuProfile, axis: str) -> None:
    """TFLOP/s of the densest GEMM sweep over `axis`."""
    sweep = max((s for s in profile.gemm if s.axis == axis), key=lambda s: len(s.dims))
    flops = 2 * sweep.m * sweep.fixed
    rates = [flops * dim / time / 1e6 for dim, time in _points(sweep)]
    axes.bar(sweep.dims, rates, color=by_alignment(sweep.dims), width=0.9)
    other = "K" if axis == "n" else "N"
    axes.set_title(f"GEMM over {axis.upper()}, M = {sweep.m}, {other} = {sweep.fixed}")
    axes.set(xlabel=axis.upper(), ylabel="TFLOP/s", xticks=range(sweep.dims[0], 4161, 32))


def _heads(axes: Axes, profile: GpuProfile) -> None:
    sweep = profile.attention[0]
    axes.bar(sweep.dims, sweep.microseconds, color=by_alignment(sweep.dims), width=0.9)
    shape = f"batch {sweep.batch}, {sweep.length} tokens, {sweep.heads} heads"
    axes.set_title(f"Attention of all pairs, {shape}")
    axes.set(xlabel="head size", ylabel="µs", xticks=range(64, 161, 16))


def _decode(axes: Axes, profile: GpuProfile) -> None:
    """Decode attention and the time to read the cache, at the batch that has all sizes."""
    kinds = (("rotary", 1, BLUE), ("rotary", 2, SKY), ("latent", 1, RED), ("latent", 2, ORANGE))
    batch, context, reading = 64, 4096, 0.0
    for form, shared, colour in kinds:
        points = [
            p
            for p in profile.decode
            if (p.form, p.key_heads // p.value_heads) == (form, shared)
            and (p.batch, p.context, p.kernel) == (batch, context, "gac")
        ]
        cached = [p.key_heads * p.key_size + p.value_heads * p.value_size for p in points]
        label = f"{form} keys, {shared} to a value head"
        axes.scatter(cached, [p.microseconds for p in points], s=9, color=colour, label=label)
        reading = max([reading, *cached])
    if profile.ceilings:
        moved = 2 * batch * context * reading / profile.ceilings.terabytes_per_second / 1e6
        axes.plot([0, reading], [0, moved], color=GREY, linewidth=1, label="reading the cache")
    axes.set_title(f"Decode attention, batch {batch}, {context} tokens")
    axes.set(xlabel="numbers cached per token", ylabel="µs", ylim=(0, None))
    axes.legend(loc="upper left", fontsize=8)


def _linears(axes: Axes, profile: GpuProfile, axis: str) -> None:
    """The share of the roofline that multiples of 64 reach."""
    for m, colour in _BATCHES:
        sweeps = [s for s in profile.linear if (s.axis, s.m) == (axis, m)]
        if not sweeps or not profile.ceilings:
            continue
        sweep = max(sweeps, key=lambda s: len(s.dims))
        points = [(dim, time) for dim, time in _points(sweep) if dim % 64 == 0]
        ceilings = profile.ceilings
        share = []
        for dim, time in points:
            moved = 2 * (m * dim + m * sweep.fixed + dim * sweep.fixed)
            ideal = max(
                moved / ceilings.terabytes_per_second,
                2 * m * dim * sweep.fixed / ceilings.teraflops,
            )
            share.append(100 * ideal / 1e6 / time)
        axes.plot([dim for dim, _ in points], share, color=colour, linewidth=1, label=f"M = {m}")
    other = "K" if axis == "n" else "N"
    axes.set_title(f"Linears over {axis.upper()}, {other} = 4096: share of the roofline")
    axes.set(xlabel=axis.upper(), ylabel="%", ylim=(0, 105), xscale="log")
    axes.set_xticks([64, 256, 1024, 4096, 16384], ["64", "256", "1024", "4096", "16384"])
    axes.minorticks_off()
    axes.legend(loc="lower right", fontsize=8)


def _points(sweep: Sweep) -> list[tuple[int, float]]:
    return list(zip(sweep.dims, sweep.microseconds, strict=True))


if __name__ == "__main__":
    main()
