"""Two GPUs serve one model: equal tokens, the speedup, and what alignment is worth.

    python -m benchmarks.engines.parallel OUT --demo build/demo-gac
    python -m benchmarks.engines.parallel OUT --demo build/demo-gac --parts tokens-fp8 fp8

`tokens`: the demo model and what `vllm-gac compress` made of it, at TP 1 and 2. `speed`: dense and
compressed models of Llama-3-8B's shape at TP 1 and 2. One of them is aligned before it is sharded,
but not after. `tokens-fp8` and `fp8`: the same with FP8 weights and an FP8 cache, at TP 2 and PP 2;
--forms adds a model with latents and low rank. The engines of a part start together and are
measured one after the other. Writes OUT/parallel.json, even if an engine failed, and
OUT/parallel.md if none did.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import demo_text
from benchmarks.common.engine_process import Engine, EngineError, asking_until
from benchmarks.common.engine_questions import batch_seconds, complete, facts, score
from benchmarks.common.page import add_commit, documented, save, source
from benchmarks.engines.parallel.models import (
    FP8_RUNS,
    RUNS,
    SHAPES,
    Batch,
    Run,
    Shape,
    in_fp8,
    write,
    write_fp8,
)
from benchmarks.engines.parallel.report import page
from vllm_gac import demo

_PARTS = ("tokens", "speed", "tokens-fp8", "fp8")
_TOP = 5  # logprobs of each step
_SHUTDOWN_SECONDS = 20


@dataclass(frozen=True)
class Job:
    """One engine: the arguments of its LLM, and how it is measured.

    `measure` is given a function like `Engine.ask` that keeps to the deadline.
    """

    name: str
    tp: int
    pp: int
    options: dict[str, Any]
    measure: Callable[[Callable[..., Any]], dict[str, Any]]


def main() -> int:
    """Run the parts, write and print the page; 1 if an engine failed."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--demo", type=Path, default=Path("build/demo-gac"))
    parser.add_argument("--forms", type=Path, help="another compressed demo model, for tokens-fp8")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS[:2])
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--at-once", type=int, default=8, help="engines side by side (default: 8)")
    parser.add_argument("--seconds", type=float, default=540, help="time limit (default: 540)")
    add_commit(parser)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds

    result: dict[str, Any] = {
        "command": f"python -m benchmarks.engines.parallel {shlex.join(sys.argv[1:])}",
        **source(args.commit),
        "shape": args.shape,
        "at_once": args.at_once,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    expected = 0
    with tempfile.TemporaryDirectory() as work:
        shape, jobs_of = SHAPES[args.shape], _jobs(args)
        result["layer"], *_ = write(Path(work) / "speed", shape)
        for part in args.parts:
            jobs = jobs_of[part](Path(work) / part)
            expected += len(jobs)
            logs = args.out / f"{part}-logs"
            result[part] = {}
            for name, measured in _run(jobs, logs, args.at_once, deadline):
                result[part][name] = measured
                (args.out / "parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    complete_results = sum(len(result[part]) for part in args.parts) == expected
    if not complete_results:
        print(f"engines failed, see {args.out}/*-logs", file=sys.stderr)
        return 1
    text = page(result)
    save(args.out / "parallel", result, text)
    print(text)
    return 0


def _jobs(args: argparse.Namespace) -> dict[str, Callable[[Path], list[Job]]]:
    """What makes the engines of each part, given a directory for its models."""
    shape = SHAPES[args.shape]
    models = {"dense": demo.MODEL, "GAC": args.demo}
    forms = {"latents and low rank": args.forms} if args.forms else {}
    ways = {"TP 1": (1, 1), "TP 2": (2, 1), "PP 2": (1, 2)}
    two = {way: ways[way] for way in ("TP 1", "TP 2")}

    def fp8(directory: Path) -> list[Job]:
        write_fp8(directory, shape)
        return _speed_jobs(directory, in_fp8(shape), FP8_RUNS)

    return {
        "tokens": lambda _: _tokens_jobs(models, two, shape.engine),
        "speed": lambda directory: _speed_jobs(directory, shape, RUNS),
        "tokens-fp8": lambda _: _tokens_jobs(models | forms, ways, in_fp8(shape).engine),
        "fp8": fp8,
    }


def _tokens_jobs(
    models: Mapping[str, Path], ways: Mapping[str, tuple[int, int]], engine: dict[str, Any]
) -> list[Job]:
    """The demo model, dense and compressed, on one GPU and on two."""
    size = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    return [
        Job(
            f"{name}, {way}",
            tp,
            pp,
            engine
            | size
            | {"model": str(model), "load_format": "auto" if name == "dense" else "gac"},
            _answers,
        )
        for name, model in models.items()
        for way, (tp, pp) in ways.items()
    ]


def _speed_jobs(models: Path, shape: Shape, runs: Sequence[Run]) -> list[Job]:
    def job(run: Run) -> Job:
        weights: dict[str, Any] = {"load_format": "dummy"}
        if run.options is not None:
            weights = {"load_format": "gac", "model_loader_extra_config": run.options}
        model = {"model": str(models / run.model), "kv_cache_memory_bytes": shape.cache_bytes}
        options = shape.engine | weights | model
        return Job(run.name, run.tp, run.pp, options, lambda ask: _times(ask, shape))

    return [job(run) for run in runs]


def _run(
    jobs: Sequence[Job], logs: Path, at_once: int, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each job measured, after its name, without the jobs whose engine failed."""
    for first in range(0, len(jobs), at_once):
        group = list(enumerate(jobs))[first : first + at_once]
        with ExitStack() as stack:
            engines = [_start(job, number, logs) for number, job in group]
            for engine in engines:
                stack.callback(engine.close, _SHUTDOWN_SECONDS)
            for engine in engines:  # nothing is measured while another engine still starts
                engine.wait_or_say(max(0.0, deadline - time.monotonic()))
            for (_, job), engine in zip(group, engines, strict=True):
                try:
                    yield job.name, _measure(job, engine, deadline)
                    print(f"{job.name}: measured", flush=True)
                except EngineError as e:
                    print(f"{job.name}: failed: {e}", flush=True)
            for engine in engines:  # all of them at once
                engine.dismiss()


def _start(job: Job, number: int, logs: Path) -> Engine:
    # Engines of one rank take turns with the GPUs.
    environment = {"CUDA_VISIBLE_DEVICES": str(number % 2)} if job.tp * job.pp == 1 else {}
    engine = Engine(job.name, logs / f"{number}.log", **environment)
    engine.start(
        tensor_parallel_size=job.tp,
        pipeline_parallel_size=job.pp,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.05,  # what must be free at the start: other engines are there, too
        enable_prefix_caching=False,
        disable_log_stats=False,  # requests then record when their tokens came
        seed=0,
        **job.options,
    )
    return engine


def _measure(job: Job, engine: Engine, deadline: float) -> dict[str, Any]:
    ask = asking_until(engine, deadline)
    return {"startup_seconds": engine.wait(), **ask(facts), **job.measure(ask)}


def _answers(ask: Callable[..., Any]) -> dict[str, Any]:
    """Logprobs of held-out text, token by token, and greedy completions."""
    output = demo_text.COMPLETION_TOKENS
    return {
        "text_logprobs": ask(score, windows=demo_text.windows()),
        "completions": ask(complete, prompts=demo_text.prompts(), output=output, top=_TOP),
    }


def _times(ask: Callable[..., Any], shape: Shape) -> dict[str, list[float]]:
    """Seconds of each repeat: of a batch of prompts, and of one step of a decode batch."""

    def repeats(batch: Batch) -> list[dict[str, float]]:
        size = {"prompts": batch.prompts, "length": batch.length, "output": batch.output}
        ask(batch_seconds, seed="warm-up", **size)
        return [ask(batch_seconds, seed=repeat, **size) for repeat in range(shape.repeats)]

    steps = shape.decode.output - 1
    return {
        "prefill": [times["seconds"] for times in repeats(shape.prefill)],
        "decode": [times["decode_seconds"] / steps for times in repeats(shape.decode)],
    }


if __name__ == "__main__":
    sys.exit(main())
