"""How the engine of a model is made, timed and asked about itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.engine_questions import batch_seconds
from benchmarks.engines.whole_model.models import Batch, Model


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


# ---- in vLLM's worker -------------------------------------------------------------------------


def _memory_and_compilation(worker: Any) -> tuple[int | None, float]:
    """Bytes that the weights left for the cache, and seconds in torch.compile."""
    available = getattr(worker, "available_kv_cache_memory_bytes", None)
    return available, worker.vllm_config.compilation_config.compilation_time
