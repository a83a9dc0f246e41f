"""What is measured of one model: startups, batches, and which engine came up."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine, asking_until
from benchmarks.common.engine_questions import batch_seconds, facts
from benchmarks.engines.whole_model.models import Batch, Model
from benchmarks.engines.whole_model.trace import kernel_times

# Batches whose steps are traced: one of prefill and three of decoding.
_TRACED = 4


def caches(directory: Path) -> dict[str, str]:
    """The environment in which all that an engine compiles is cached below `directory`."""
    return {
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
    }


def arguments(model: Model, directory: Path) -> dict[str, Any]:
    """Arguments of LLM(...): vLLM's defaults, except what the measurements need.

    Args:
        model: The model.
        directory: Where it was written.
    """
    weights: dict[str, Any] = {"load_format": "dummy"}
    if model.options is not None:
        weights = {"load_format": "gac", "model_loader_extra_config": model.options}
    return {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # requests then record when their tokens came
        "seed": 0,
        **weights,
    }


def run_once(ask: Callable[..., Any], batch: Batch, seed: int) -> dict[str, float]:
    """The seconds of a batch; `ask` calls a function with the engine."""
    size = {"prompts": batch.prompts, "length": batch.length, "output": batch.output}
    times: dict[str, float] = ask(batch_seconds, **size, seed=seed)
    return times


def run_all(ask: Callable[..., Any], batch: Batch) -> list[dict[str, float]]:
    """The seconds of each run of a batch, after a smaller one that warms up."""
    run_once(ask, Batch(min(batch.prompts, 16), batch.length, min(batch.output, 8)), -1)
    return [run_once(ask, batch, number) for number in range(batch.runs)]


def measure(engine: Engine, batches: Sequence[Batch], deadline: float) -> dict[str, Any]:
    """Time the batches on an engine that was started.

    Args:
        engine: The engine; it must run with disable_log_stats=False.
        batches: The batches to time. If there are four or more on a GPU, the steps of the first
            four are traced as well.
        deadline: The latest end, by `time.monotonic()`.

    Returns:
        Startup seconds, the engine's facts, the runs of each batch, and kernels.

    Raises:
        EngineError: The engine failed, or was not done in time.
    """
    ask = asking_until(engine, deadline)
    startup = engine.wait(max(0.0, deadline - time.monotonic()))
    ask(watch_compilations)
    # The first user waits for whatever is compiled only now.
    first = run_once(ask, Batch(2, 300, 4), 0)["seconds"]
    result: dict[str, Any] = {
        "startup_seconds": startup,
        "first_answer_seconds": first,
        **ask(facts),
        **ask(cache_and_compilation),
        "batches": {},
    }
    for batch in batches:
        runs = run_all(ask, batch)
        result["batches"][batch.name] = runs
        print(batch.name, [round(times["seconds"], 3) for times in runs], flush=True)
    result["compiled_after_startup"] = ask(compilations)
    if len(batches) >= _TRACED and result["device"] == "cuda":
        result["kernels"] = ask(kernel_times, batches=batches[:_TRACED])
    return result


def median(runs: list[dict[str, float]], key: str) -> float:
    """The median of `key` over the runs of one batch."""
    return statistics.median(run[key] for run in runs)


# ---- in the engine's process ------------------------------------------------------------------


def cache_and_compilation(llm: Any) -> dict[str, Any]:
    """The size of the KV cache, the memory for it, and the seconds of torch.compile."""
    config = llm.llm_engine.vllm_config
    available, compiling = llm.collective_rpc(_memory_and_compilation)[0]
    return {
        "torch_compile_seconds": compiling,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "kv_bytes_available": available or config.cache_config.kv_cache_memory_bytes,
    }


def watch_compilations(llm: Any) -> None:
    """From now on, note every kernel that Triton compiles or reads from its cache on disk."""
    llm.collective_rpc(_watch_compilations)


def compilations(llm: Any) -> list[str]:
    """The kernels noted since `watch_compilations`."""
    names: list[str] = llm.collective_rpc(_compilations)[0]
    return names


# ---- in vLLM's worker -------------------------------------------------------------------------


def _memory_and_compilation(worker: Any) -> tuple[int | None, float]:
    """Bytes that the weights left for the cache, and seconds in torch.compile."""
    available = getattr(worker, "available_kv_cache_memory_bytes", None)
    return available, worker.vllm_config.compilation_config.compilation_time


def _watch_compilations(worker: Any) -> None:
    import triton

    worker.compiled_kernels = []

    def note(*, fn: Any, **_: Any) -> None:
        worker.compiled_kernels.append(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = note


def _compilations(worker: Any) -> list[str]:
    return sorted(worker.compiled_kernels)
