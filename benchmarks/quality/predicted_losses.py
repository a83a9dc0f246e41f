"""Whether plans lose what they are expected to, and whether more freedom ever makes them worse.

    python -m benchmarks.quality.predicted_losses OUT [--device cuda]  # predicted_losses.json, .md

Plans of many budgets and methods are made from statistics of one part of the calibration text. The
demo model is compressed by each and scored on held-out text. The expected loss of each stands
beside the measured one. Those of the main budgets are also made with the fits of earlier releases
(low rank without the metric of the output, layers that are not refitted) and from other parts of
the text. A run that was stopped goes on with OUT/predicted_losses.jsonl, and the page can be
written of what is there at any time.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.page import arguments, machine, save, source
from benchmarks.quality.ladder.scores import runner
from benchmarks.quality.predicted_losses_page import page
from vllm_gac import demo
from vllm_gac.errors import GacError
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.compress import compress
from vllm_gac.steps.compress_request import CompressRequest
from vllm_gac.texts.token_text import evenly_spread, windows

# Parts of the calibration text, which do not overlap.
SEEDS = 3
_PARAMS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
_CACHES = (0.9, 0.75, 0.625, 0.5, 0.375)
# The budgets that are measured with all fits and all calibration texts.
_MAIN_PARAMS, _MAIN_CACHES = (1.0, 0.9, 0.8, 0.7), (1.0, 0.75, 0.5)
# How the weights are made.
FITS = {
    "now": CompressRequest(),
    "not refitted": CompressRequest(no_refit=True),
    "as before": CompressRequest(no_refit=True, whitening="svd-llm"),
}
# Windows of so many tokens are scored: by default so many, and at least so many.
_WINDOW, _WINDOWS, _FEWEST = 512, 128, 8


@dataclass(frozen=True)
class Case:
    """A name for methods and forms, budgets, and the request for them."""

    name: str
    params: float
    cache: float
    request: PlanRequest

    @property
    def is_main(self) -> bool:
        """Whether it is measured with all fits and all calibration texts."""
        return self.params in _MAIN_PARAMS and self.cache in _MAIN_CACHES


@dataclass(frozen=True)
class Task:
    """A case to measure with the statistics `stats` of calibration text `seed`, and one fit."""

    case: Case
    seed: int
    fit: str
    stats: Path
    device: str
    windows: int

    def name(self) -> dict[str, Any]:
        """What tells its row from others."""
        about = {"case": self.case.name, "params": self.case.params, "cache": self.case.cache}
        return {**about, "seed": self.seed, "fit": self.fit}


def cases() -> Iterator[Case]:
    """All requests."""
    for params in _PARAMS:
        for methods in ("lowrank", "prune"):
            yield _case(methods, params, 1.0)
        for cache in (0.75, 0.5):
            yield _case("heads,prune", params, cache)
            yield _case("heads,prune,lowrank", params, cache)
        yield _case("heads,lowrank", params, 0.75)
    for cache in _CACHES:
        for form in ("rotary", "latent", "auto"):
            yield _case("heads", 1.0, cache, form)


def _case(methods: str, params: float, cache: float, form: str | None = None) -> Case:
    request = PlanRequest(param_ratio=params, kv_ratio=cache, methods=tuple(methods.split(",")))
    if form is None:
        return Case(methods, params, cache, request)
    return Case(f"{methods}, {form} keys", params, cache, replace(request, key_form=form))


def main() -> None:
    """Measure every plan; write the tables."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "predicted_losses.jsonl"
    without_a_cut_line(file)
    if not args.found:
        _measure(args, file)
    rows = lines_of(file)
    if len(rows) < 2:  # the dense model's, and a plan's
        raise GacError(f"{file}: no plan has been measured; leave --found out")
    about = {"command": _command(args.device, rows), **source(args.commit), **_machine(args, rows)}
    text = page(rows, about)
    save(args.out / "predicted_losses", about | {"rows": rows}, text)
    print(text)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument(
        "--texts",
        type=int,
        default=SEEDS,
        choices=range(1, SEEDS + 1),
        help="how many calibration texts (default: all)",
    )
    parser.add_argument(
        "--fits",
        nargs="+",
        choices=FITS,
        default=list(FITS),
        help="how the weights are made; the first fits all plans, the others the main budgets",
    )
    parser.add_argument(
        "--windows", type=int, default=_WINDOWS, help=f"of {_WINDOW} tokens, to score"
    )
    parser.add_argument(
        "--found",
        action="store_true",
        help="measure nothing; write the page of what is there, of --device",
    )
    return parser.parse_args()


def _command(device: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that measures `rows`, without paths of this machine."""
    fits = list(dict.fromkeys(row["fit"] for row in rows[1:]))
    options = {
        "--device": (device, "cpu"),
        "--windows": (len(rows[0]["losses"]), _WINDOWS),
        "--texts": (len({row["seed"] for row in rows[1:]}), SEEDS),
        "--fits": (shlex.join(fits), shlex.join(FITS)),
    }
    given = [f"{name} {value}" for name, (value, usual) in options.items() if value != usual]
    return " ".join(["python -m benchmarks.quality.predicted_losses OUT", *given])


def _machine(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine that measured `rows`."""
    found = {key: rows[0][key] for key in ("machine", "torch", "triton")}
    if args.device == "cpu":
        found["machine"] = f"CPU ({found['machine']})"
    return found


def _measure(args: argparse.Namespace, file: Path) -> None:
    """Append what is not in `file` yet: the dense model's row, and one for each task."""
    rows = lines_of(file)
    if not rows:
        about = {"case": "dense", **machine(args.device)}
        append_line(file, about | _scores(demo.MODEL, args.device, args.windows))
    elif len(rows[0]["losses"]) != args.windows:
        raise GacError(
            f"{file}: scored on {len(rows[0]['losses'])} windows, not {args.windows}: give "
            f"--windows {len(rows[0]['losses'])}, or another OUT"
        )
    names = [
        {key: row.get(key) for key in ("case", "params", "cache", "seed", "fit")} for row in rows
    ]
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))  # they share a GPU
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for seed in range(args.texts):
            stats = _calibrated(args.out, seed, args.device)
            tasks = [
                Task(case, seed, fit, stats, args.device, args.windows)
                for number, fit in enumerate(args.fits)
                for case in cases()
                if case.is_main or (seed == 0 and number == 0)
            ]
            for row in pool.imap_unordered(_row, [t for t in tasks if t.name() not in names]):
                append_line(file, row)
                print(row["case"], row["params"], row["cache"], row["fit"], flush=True)


def _calibrated(directory: Path, seed: int, device: str) -> Path:
    """Statistics of part `seed` of the text, unless `directory` has them."""
    blocks = demo.CALIBRATION.read_text(encoding="utf-8").split("\n\n\n")
    text, stats = directory / f"text-{seed}.txt", directory / f"stats-{seed}.safetensors"
    text.write_text("\n\n\n".join(blocks[seed::SEEDS]), encoding="utf-8")
    if not stats.exists():
        calibrate(demo.MODEL, [text], stats, device=device, progress=False)
    return stats


def _row(task: Task) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        compressed = compress(
            demo.MODEL,
            out,
            task.case.request,
            FITS[task.fit],
            stats=task.stats,
            device=task.device,
            progress=False,
        )
        expected = {"expected": compressed.plan.expected_loss}
        return task.name() | expected | _scores(out, task.device, task.windows)


def _scores(directory: Path, device: str, count: int) -> dict[str, Any]:
    """By window: the loss in nats per token, and the divergence from the dense model."""
    predicted = _log_probabilities(directory, device)
    losses, divergences = [], []
    for window, dense in zip(_held_out(count), _dense(device, count), strict=True):
        log_probabilities = predicted(window)
        targets = window[1:, None].to(device)
        losses.append(-float(log_probabilities.gather(1, targets).mean()))
        divergences.append(float((dense.exp() * (dense - log_probabilities)).sum(1).mean()))
    return {
        "losses": [round(loss, 6) for loss in losses],
        "divergences": [round(divergence, 7) for divergence in divergences],
    }


@lru_cache
def _dense(device: str, count: int) -> list[Tensor]:
    """What the dense model predicts in each window, log probabilities [length - 1, vocabulary]."""
    predicted = _log_probabilities(demo.MODEL, device)
    return [predicted(window) for window in _held_out(count)]


def _log_probabilities(directory: Path, device: str) -> Callable[[Tensor], Tensor]:
    logits_of = runner(directory, device)

    @torch.inference_mode()
    def predicted(window: Tensor) -> Tensor:
        return logits_of(window[None])[0, :-1].float().log_softmax(-1)

    return predicted


@lru_cache
def _held_out(count: int) -> Tensor:
    """Windows of the held-out text [count, length], spread evenly over it."""
    parts = windows(demo.MODEL, [demo.HELD_OUT], length=_WINDOW, max_tokens=None)
    whole = torch.cat([part for part in parts if part.shape[1] == _WINDOW])
    if not _FEWEST <= count <= len(whole):
        raise GacError(
            f"--windows {count}: at least {_FEWEST}, and the held-out text has {len(whole)}"
        )
    return whole[evenly_spread(count, len(whole))]


if __name__ == "__main__":
    try:
        main()
    except GacError as error:
        sys.exit(f"error: {error}")
