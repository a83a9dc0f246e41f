"""Compression together with quantization, FP8 KV, sleep and reload, and LoRA, on one GPU.

    python -m benchmarks.engines.combinations OUT [--device cuda] [--part PART]

PART is quantization, kv, lifecycle or lora.

Writes OUT/combinations.json and .md; results of other parts in OUT are kept. The engines of a part
start side by side and are then asked one at a time. On a CPU, --small shows that everything runs;
the page says what a CPU cannot do.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import demo_text, engine_questions
from benchmarks.common.completions import compared
from benchmarks.common.engine_process import Engine, EngineError
from benchmarks.common.page import arguments, provenance, save
from benchmarks.engines.combinations import models
from benchmarks.engines.combinations.report import page
from vllm_gac import demo

# Prompts, their length in tokens, and the length of their answers.
BATCHES = {"64x128->256": (64, 128, 256), "16x2048->1": (16, 2048, 1)}
SMALL_BATCHES = {"4x16->8": (4, 16, 8), "2x64->1": (2, 64, 1)}
RUNS = 2
SCORED_EVERY = 15


def main() -> None:
    """Run the chosen parts one after the other."""
    parser = arguments(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--work", type=Path, default=Path("build/combinations"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    args = parser.parse_args()
    kept = args.out / "combinations.json"
    result: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"parts": {}}
    for name in args.part or PARTS:
        start = time.monotonic()
        command = (
            f"python -m benchmarks.engines.combinations OUT --device {args.device} --part {name}"
        )
        about = provenance(command, args.device, args.commit)
        found = PARTS[name](args)
        about["seconds"] = round(time.monotonic() - start)
        result["parts"][name] = about | found
        text = page(result)
        save(args.out / "combinations", result, text)
        print(text)


def quantization(args: argparse.Namespace) -> dict[str, Any]:
    """Throughput of Llama-3-8B's shape and perplexity of the demo model, in bf16 and in FP8."""
    shapes = models.shapes(args.work / "shapes", args.small)
    fast = {
        f"{name} {dtype}": (shapes[name], asked)
        for name in ("dense", "gac", "misaligned")
        for dtype, asked in (("bf16", {}), ("fp8", {"quantization": "fp8_per_tensor"}))
        if (name, dtype) != ("misaligned", "bf16")
    }
    trained = _demos(args)
    demos = {
        f"demo {name} {how}": (trained[name], how)
        for name, how in (
            *(("dense", how) for how in ("bf16", "fp8_per_tensor")),
            *(("misaligned", how) for how in ("bf16", "fp8_per_tensor", "fp8_per_block")),
        )
    }
    length = 128 if args.small else 2304
    batches = SMALL_BATCHES if args.small else BATCHES
    with _engines(args) as start:
        timed = {
            name: start(
                name,
                model,
                **_dummy(name),
                **options,
                max_model_len=length,
                max_num_seqs=64,
                kv_cache_memory_bytes=(1 if args.small else 6) << 30,
            )
            for name, (model, options) in fast.items()
        }
        # These only score a text, so nothing is compiled for them.
        scoring = {
            name: start(
                name,
                model,
                enforce_eager=True,
                **({} if how == "bf16" else {"quantization": how}),
            )
            for name, (model, how) in demos.items()
        }
        for engine in (*timed.values(), *scoring.values()):
            engine.wait_or_say()  # so that no engine compiles while another is timed
        return {
            "throughput": {
                name: _answer_or_error(engine, lambda engine: _timed(engine, batches))
                for name, engine in timed.items()
            },
            "perplexity": _against(
                {
                    name: _answer_or_error(engine, lambda engine: {"logprobs": _scored(engine)})
                    for name, engine in scoring.items()
                },
                "bf16",
            ),
        }


def kv(args: argparse.Namespace) -> dict[str, Any]:
    """FP8 KV against bf16 KV, and a cache that is offloaded to the CPU and brought back."""
    caches = {
        f"{name} {dtype}": (model, {"kv_cache_dtype": dtype})
        for name, model in _demos(args).items()
        for dtype in ("auto", "fp8")
    }
    with _engines(args) as start:
        # Small chunks, so that most keys and values come from the cache.
        asked = {
            name: start(name, model, max_num_batched_tokens=256, **options)
            for name, (model, options) in caches.items()
        }
        offloading = start(
            "offloading",
            _demos(args)["misaligned"],
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
            },
        )
        return {
            "caches": _against(
                {
                    name: _answer_or_error(
                        engine, lambda e: {"logprobs": _scored(e), "answers": _answers(e)}
                    )
                    for name, engine in asked.items()
                },
                "auto",
            ),
            "offloading": _answer_or_error(offloading, _offloaded),
        }


def lifecycle(args: argparse.Namespace) -> dict[str, Any]:
    """A padded checkpoint sleeps, wakes up, is read again, and decodes speculatively."""
    model = _demos(args)["misaligned"]
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,  # short matches, so that some drafts are wrong
        "prompt_lookup_max": 3,
    }
    with _engines(args) as start:
        sleeper = start("sleeper", model, enable_sleep_mode=args.device != "cpu")
        drafting = start("ngram", model, speculative_config=ngram, disable_log_stats=False)
        drafting.wait_or_say()  # its start takes memory, and `sleep` measures memory
        steps = _answer_or_error(sleeper, _life_cycle)
        ngram_said = _answer_or_error(
            drafting, lambda e: {"answers": _answers(e), **e.ask(engine_questions.drafts)}
        )
    base = steps.get("start", {})
    return {
        "steps": {
            name: compared(step, base) if name not in ("facts", "error") else step
            for name, step in steps.items()
        },
        "ngram": compared(ngram_said, base),
    }


def lora(args: argparse.Namespace) -> dict[str, Any]:
    """A LoRA adapter on unequal, padded and latent attention, against the merged model."""
    model = _demos(args)["misaligned"]
    adapter, merged = models.adapter_and_merged(model, args.work / "lora")
    with _engines(args) as start:
        adapted = start("adapted", model, enable_lora=True, max_lora_rank=models.RANK)
        alone = start("merged", merged)

        # Without the adapter before and after, to see whether it leaves anything behind.
        said = {
            "merged": _answer_or_error(alone, lambda e: {"logprobs": _scored_next(e)}),
            "base": _answer_or_error(adapted, lambda e: {"logprobs": _scored_next(e)}),
            "adapter": _answer_or_error(
                adapted, lambda e: {"logprobs": _scored_next(e, str(adapter))}
            ),
            "base again": _answer_or_error(adapted, lambda e: {"logprobs": _scored_next(e)}),
        }
    return {name: compared(x, said["merged"]) for name, x in said.items()}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "quantization": quantization,
    "kv": kv,
    "lifecycle": lifecycle,
    "lora": lora,
}


@contextmanager
def _engines(args: argparse.Namespace) -> Iterator[Callable[..., Engine]]:
    """A function that starts engines; they end with this context."""
    with ExitStack() as stack:

        def start(name: str, model: Path, **options: Any) -> Engine:
            few = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
            common = {
                "load_format": "gac",
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "disable_log_stats": True,
                "kv_cache_memory_bytes": 1 << 30,
                "gpu_memory_utilization": 0.05,
                "compilation_config": few,
            }
            if "max_num_seqs" in options:
                few["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32, options["max_num_seqs"]]
            if args.device == "cpu":
                common |= {"enforce_eager": True}
                del common["gpu_memory_utilization"], common["compilation_config"]
            log = args.work / "logs" / f"{name.replace(' ', '-')}.log"
            # In one process: `sleep` measures memory, and workers see the model.
            engine = Engine(name, log, VLLM_ENABLE_V1_MULTIPROCESSING="0")
            stack.callback(engine.close)
            engine.start(model=str(model), **common | options)
            return engine

        yield start


def _demos(args: argparse.Namespace) -> dict[str, Path]:
    return {
        "dense": demo.MODEL,
        "gac": models.compressed_demo(args.work / "demo-gac", args.device),
        "misaligned": models.misaligned_demo(args.work / "demo-misaligned", args.device),
    }


def _dummy(name: str) -> dict[str, Any]:
    """Options for random weights from vLLM's loader or from ours."""
    if name.startswith("dense"):
        return {"load_format": "dummy"}
    return {"load_format": "gac", "model_loader_extra_config": {"weights": "dummy"}}


def _answer_or_error(engine: Engine, ask: Callable[[Engine], dict[str, Any]]) -> dict[str, Any]:
    """What `ask` returns, and the engine's facts; or its error, so that the others go on."""
    try:
        facts = engine.ask(engine_questions.facts) | {"seconds": engine.wait()}
        return ask(engine) | {"facts": facts}
    except EngineError as e:
        print(f"{engine.name}: {e}", flush=True)
        return {"error": str(e)}


def _against(said: dict[str, dict[str, Any]], base: str) -> dict[str, dict[str, Any]]:
    """Compare each answer in `said`, by "MODEL HOW", with that of the same model and `base`."""
    return {
        name: compared(x, said[f"{name.rpartition(' ')[0]} {base}"]) for name, x in said.items()
    }


def _timed(engine: Engine, batches: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
    return {
        "seconds": {
            name: engine.ask(
                engine_questions.throughput, prompts=count, length=length, output=output, runs=RUNS
            )
            for name, (count, length, output) in batches.items()
        }
    }


def _scored(engine: Engine) -> list[float]:
    scored: list[float] = engine.ask(engine_questions.score, windows=demo_text.windows())
    return scored


def _scored_next(engine: Engine, adapter: str | None = None) -> list[float]:
    scored: list[float] = engine.ask(
        engine_questions.score_next,
        windows=demo_text.windows(),
        every=SCORED_EVERY,
        adapter=adapter,
    )
    return scored


def _answers(engine: Engine) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = engine.ask(
        engine_questions.complete,
        prompts=demo_text.prompts(),
        output=demo_text.COMPLETION_TOKENS,
    )
    return answers


def _offloaded(engine: Engine) -> dict[str, Any]:
    """Complete the same long prompts before and after the GPU's cache is emptied."""
    text = demo_text.held_out_tokens()
    prompts = [text[i : i + 400] for i in range(0, 1600, 400)]

    def complete() -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = engine.ask(
            engine_questions.complete, prompts=prompts, output=16
        )
        return answers

    first = complete()
    _answers(engine)  # blocks are moved while later steps run
    engine.ask(engine_questions.forget_prefixes)
    return {"first": first, "brought back": complete()}


def _life_cycle(engine: Engine) -> dict[str, Any]:
    """Answers and scores at the start, and after each sleep, wake-up and reload."""
    steps: dict[str, Any] = {}

    def look(after: str, **more: Any) -> None:
        engine.ask(engine_questions.forget_prefixes)
        steps[after] = {"answers": _answers(engine), "logprobs": _scored(engine), **more}

    look("start")
    look("asked again")
    for level in (1, 2):
        try:
            freed = engine.ask(engine_questions.sleep, level=level)
            engine.ask(engine_questions.wake, level=level)
        except EngineError as e:
            # An engine that failed answers nothing more.
            return steps | {f"sleep level {level} and wake": {"error": str(e)}}
        look(f"sleep level {level} and wake", freed_bytes=freed)
    engine.ask(engine_questions.reload)
    look("reload_weights")
    return steps


if __name__ == "__main__":
    main()
