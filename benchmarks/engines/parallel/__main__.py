"""Tensor parallelism on two GPUs: equal tokens, the speedup, and what alignment is worth.

    python -m benchmarks.engines.parallel OUT --demo build/demo-gac

`tokens`: the demo model and what `vllm-gac compress` made of it, at TP 1 and 2. `speed`: dense and
compressed models of Llama-3-8B's shape at TP 1 and 2. One of them is aligned before it is sharded,
but not after. The engines of a part start together and are measured one after the other. Writes
OUT/parallel.json, even if an engine failed, and OUT/parallel.md if none did.
"""

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import demo_text
from benchmarks.common.engine_process import Engine, EngineError, asking_until
from benchmarks.common.engine_questions import batch_seconds, complete, facts, score
from benchmarks.common.page import add_commit, documented, save, source
from benchmarks.engines.parallel.models import RUNS, SHAPES, Batch, Run, Shape, write
from benchmarks.engines.parallel.report import page
from vllm_gac import demo

_PARTS = ("tokens", "speed")
_TOP = 5  # logprobs of each step
_SHUTDOWN_SECONDS = 20


@dataclass(frozen=True)
class Job:
    """One engine: the arguments of its LLM, and how it is measured.

    `measure` is given a function like `Engine.ask` that keeps to the deadline.
    """

    name: str
    tp: int
    options: dict[str, Any]
    measure: Callable[[Callable[..., Any]], dict[str, Any]]


def main() -> int:
    """Run the parts, write and print the page; 1 if an engine failed."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--demo", type=Path, default=Path("build/demo-gac"))
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
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
        result["layer"], *_ = write(Path(work), SHAPES[args.shape])
        for part in args.parts:
            if part == "tokens":
                jobs = _tokens_jobs(args.demo, SHAPES[args.shape].engine)
            else:
                jobs = _speed_jobs(Path(work), SHAPES[args.shape])
            expected += len(jobs)
            logs = args.out / f"{part}-logs"
            result[part] = _run(jobs, logs, args.at_once, deadline)
            (args.out / "parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    complete_results = sum(len(result[part]) for part in args.parts) == expected
    if not complete_results:
        print(f"engines failed, see {args.out}/*-logs", file=sys.stderr)
        return 1
    text = page(result)
    save(args.out / "parallel", result, text)
    print(text)
    return 0


def _tokens_jobs(compressed: Path, engine: dict[str, Any]) -> list[Job]:
    """The demo model, dense and compressed, on one GPU and on two."""
    models = {
        "dense": {"model": str(demo.MODEL), "load_format": "auto"},
        "GAC": {"model": str(compressed), "load_format": "gac"},
    }
    size = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    return [
        Job(f"{name}, TP {tp}", tp, engine | model | size, _answers)
        for name, model in models.items()
        for tp in (1, 2)
    ]


def _speed_jobs(models: Path, shape: Shape) -> list[Job]:
    def job(run: Run) -> Job:
        weights: dict[str, Any] = {"load_format": "dummy"}
        if run.options is not None:
            weights = {"load_format": "gac", "model_loader_extra_config": run.options}
        model = {"model": str(models / run.model), "kv_cache_memory_bytes": shape.cache_bytes}
        options = shape.engine | weights | model
        return Job(run.name, run.tp, options, lambda ask: _times(ask, shape))

    return [job(run) for run in RUNS]


def _run(
    jobs: Sequence[Job], logs: Path, at_once: int, deadline: float
) -> dict[str, dict[str, Any]]:
    """What each job measured, by name, without the jobs whose engine failed."""
    measured = {}
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
                    measured[job.name] = _measure(job, engine, deadline)
                    print(f"{job.name}: measured", flush=True)
                except EngineError as e:
                    print(f"{job.name}: failed: {e}", flush=True)
            for engine in engines:  # all of them at once
                engine.dismiss()
    return measured


def _start(job: Job, number: int, logs: Path) -> Engine:
    # Engines of one rank take turns with the GPUs.
    environment = {"CUDA_VISIBLE_DEVICES": str(number % 2)} if job.tp == 1 else {}
    engine = Engine(job.name, logs / f"{number}.log", **environment)
    engine.start(
        tensor_parallel_size=job.tp,
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
