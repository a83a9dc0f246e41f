"""What compression costs models of growing size: text, training, measuring, and the page.

    python -m benchmarks.quality.ladder text TEXT
    python -m benchmarks.quality.ladder train 130m DIR --text TEXT --minutes 10 --device cuda
    python -m benchmarks.quality.ladder measure DIR OUT.jsonl --text TEXT --device cuda
    python -m benchmarks.quality.ladder report RESULTS

The first command collects text that is at hand, the second trains a Llama on it, the third
compresses that by every form and budget and scores each result on held-out text. They go on where
they were stopped. The last one writes the pages. The models are too large to ship; the scripts, the
hashes and the learning curves are what is kept.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.page import add_commit
from benchmarks.quality.ladder.measure import HEAL_TOKENS, measure
from benchmarks.quality.ladder.rows import chosen
from benchmarks.quality.ladder.sizes import ROPE_THETAS, SIZES
from benchmarks.quality.ladder.text import read_manifest, write_text_directory
from benchmarks.quality.ladder.training import SAVE_SECONDS, Point, Run, train
from vllm_gac.errors import GacError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (GacError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.ladder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("text", help="collect text from what is installed")
    verb.add_argument("out", type=Path, metavar="TEXT", help="the directory to write")
    verb.add_argument("--library", type=Path, help="standard library, or a packed one")
    verb.add_argument("--packages", nargs="*", help="only these (default: all)")
    verb.set_defaults(run=_text)
    verb = verbs.add_parser("train", help="train a model, or go on with it")
    verb.add_argument("size", choices=SIZES)
    verb.add_argument("directory", type=Path, metavar="DIR", help="of the run")
    verb.add_argument("--text", type=Path, required=True)
    verb.add_argument("--tokens", type=int, default=200_000_000, help="of the whole schedule")
    verb.add_argument("--minutes", type=float, default=60.0, help="end the schedule after these")
    verb.add_argument("--length", type=int, default=2048, help="tokens of a window")
    verb.add_argument("--rope-theta", type=float, default=ROPE_THETAS[0])
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--save-seconds", type=float, default=SAVE_SECONDS, help="of a checkpoint")
    verb.add_argument("--device", default="cpu")
    add_commit(verb)
    verb.set_defaults(run=_train)
    verb = verbs.add_parser("measure", help="compress and score a trained model")
    verb.add_argument("directory", type=Path, metavar="DIR", help="of the training run")
    verb.add_argument("out", type=Path, metavar="OUT.jsonl", help="rows are appended to it")
    verb.add_argument("--text", type=Path, required=True)
    verb.add_argument("--rows", nargs="*", default=["*"], help="names or patterns (default: all)")
    verb.add_argument("--calibration", type=int, default=0, help="number of the text: 0, 1 or 2")
    verb.add_argument("--max-tokens", type=int, help="of calibration")
    verb.add_argument("--heal-tokens", type=int, default=HEAL_TOKENS, help="of a healed row")
    verb.add_argument("--device", default="cpu")
    verb.add_argument("--workers", type=int, default=1, help="rows that are measured at once")
    add_commit(verb)
    verb.set_defaults(run=_measure)
    verb = verbs.add_parser("report", help="write the page, the picture and the cards")
    verb.add_argument("directory", type=Path, metavar="RESULTS", help="a folder for each model")
    verb.set_defaults(run=_report_of)
    return parser


def _text(options: argparse.Namespace) -> None:
    manifest = write_text_directory(options.out, options.library, options.packages)
    print(
        f"{manifest['documents']:,} documents, {manifest['characters']:,} characters, "
        f"{manifest['train_tokens']:,} tokens to train on, {manifest['held_out_windows']} windows "
        f"held out; SHA-256 {manifest['sha256']}"
    )


def _train(options: argparse.Namespace) -> None:
    run = Run(
        size=options.size,
        rope_theta=options.rope_theta,
        tokens=options.tokens,
        minutes=options.minutes,
        length=options.length,
        seed=options.seed,
        text_sha256=read_manifest(options.text)["sha256"],
    )
    where, text, device = options.directory, options.text, options.device
    more = {"commit": options.commit, "save_seconds": options.save_seconds}
    print(train(where, text, run, device, on_point=_report, **more))


def _report(point: Point) -> None:
    print(
        f"step {point.step}  {point.tokens / 1e6:.1f} M tokens  train {point.train_loss:.4f}  "
        f"validation {point.validation_loss:.4f}  {point.seconds:.0f} s",
        flush=True,
    )


def _report_of(options: argparse.Namespace) -> None:
    from benchmarks.quality.ladder.report import write_report  # matplotlib is of the extra `dev`

    print(write_report(options.directory))


def _measure(options: argparse.Namespace) -> None:
    measure(
        options.directory,
        options.text,
        options.out,
        names=chosen(options.rows),
        calibration=options.calibration,
        device=options.device,
        workers=options.workers,
        max_tokens=options.max_tokens,
        heal_tokens=options.heal_tokens,
        commit=options.commit,
    )


if __name__ == "__main__":
    sys.exit(main())
