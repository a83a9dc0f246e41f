"""One wave of requests that share a prefix, in the engine's process."""

from typing import Any

from benchmarks.common.engine_batches import answer, random_tokens

ADDED, ANSWER = 100, 8


def warm_up(llm: Any) -> None:
    """Answer one short prompt."""
    answer(llm, [random_tokens(llm, ADDED, "warm")], ANSWER)


def answer_wave(llm: Any, prefix: int, requests: int) -> dict[str, Any]:
    """Answer a prompt of `prefix` tokens, then `requests` prompts at once that begin with it."""
    config = llm.llm_engine.vllm_config
    text = random_tokens(llm, config.model_config.max_model_len, "prefix")[:prefix]
    _, first = answer(llm, [text], ANSWER)
    held = llm.collective_rpc(_start)[0]
    prompts = [text + random_tokens(llm, ADDED, f"own {i}") for i in range(requests)]
    outputs, seconds = answer(llm, prompts, ANSWER)
    most, taken, in_use = llm.collective_rpc(_most)[0]
    return {
        "cache tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "prefix": prefix,
        "requests": requests,
        "answered": len(outputs),
        "cached tokens of a request": min(output.num_cached_tokens for output in outputs),
        "prefix s": round(first, 2),
        "requests s": round(seconds, 2),
        "held MiB": (most - held) >> 20,
        "left free MiB": llm.collective_rpc(_left_free)[0] >> 20,
        "PyTorch MiB": taken >> 20,
        "in use MiB": in_use >> 20,
    }


# ---- in vLLM's worker -------------------------------------------------------------------------


def _left_free(worker: Any) -> int:
    """Bytes that vLLM left beside weights and cache for what a step holds."""
    return int(getattr(worker, "peak_activation_memory", 0))


def _start(worker: Any) -> int:
    """Bytes that are held between steps; from here on, the peak is counted."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _most(worker: Any) -> tuple[int, int, int]:
    """The peak, what PyTorch has of the GPU, and what all processes have of it, in bytes."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free
