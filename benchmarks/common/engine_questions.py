"""What the benchmarks ask an engine: functions of vLLM's LLM whose arguments and results are plain.

`engine_process.Engine.ask` calls them in the engine's process.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.common.page import machine

# Kernels by what they do, in the order in which their names are looked at.
_OWNERS = {
    "all-reduce": r"all_?reduce|cross_device_reduce|nccl",
    "Adam": r"multi_tensor|[aA]dam",
    "attention": r"flash|fmha|attention|split_kv|^merge|_rotate|rotary|and_cache|gather_rows",
    "norms and quantization": r"norm|quant|silu|act_and_mul|_rows|triton_(red|poi|per)_fused",
    "GEMM": r"gemm|cutlass|nvjet|cublas|xmma|splitKreduce|_swiglu",
}
# Decode steps that are profiled, and kernels that are named.
_PROFILED_STEPS, _NAMED = 16, 15


def facts(llm: Any) -> dict[str, Any]:
    """What the engine is.

    Returns:
        The machine and versions, as in a page's provenance; `kv_tokens`, how many tokens fit into
        the cache.
    """
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        **machine(config.device_config.device_type),
        "vllm": vllm.__version__,
        "kv_tokens": config.cache_config.kv_cache_size_tokens,
    }


def batch_seconds(
    llm: Any, prompts: int, length: int, output: int, seed: object
) -> dict[str, float]:
    """Seconds of one batch of random prompts, and of its decoding alone.

    The engine must run with disable_log_stats=False: requests then record when tokens came.

    Args:
        llm: The engine.
        prompts: How many prompts.
        length: Tokens of each prompt.
        output: Tokens of each answer.
        seed: Another seed makes other prompts, so that no prefix is cached.

    Raises:
        RuntimeError: An answer is missing or has another length.
    """
    batch, sampling = _requests(llm, prompts, length, output, seed)
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if [len(one.outputs[0].token_ids) for one in outputs] != [output] * prompts:
        raise RuntimeError(f"{prompts} prompts: answers of another length than {output}")
    # From the last request's first token to the last token of all, every step decodes.
    stats = [one.metrics for one in outputs]
    decode_seconds = max(s.last_token_ts for s in stats) - max(s.first_token_ts for s in stats)
    return {"seconds": seconds, "decode_seconds": float(decode_seconds)}


def kernel_shares(llm: Any, prompts: int, length: int, output: int, seed: object) -> dict[str, Any]:
    """What kernels of rank 0 take: of a prefill, or of some steps in which all sequences decode.

    The arguments are those of `batch_seconds`. Prefill is profiled if answers have one token.

    Returns:
        As `shares_of`; and `allocated`, how often torch took memory from the GPU meanwhile, which
        all kernels wait for.
    """
    batch, sampling = _requests(llm, prompts, length, output, seed)
    engine, decodes = llm.llm_engine, output > 1
    if not decodes:
        llm.collective_rpc(_begin_profile)
    for number, prompt in enumerate(batch):
        engine.add_request(f"profiled {number}", prompt, sampling)
    if decodes:
        begun: set[str] = set()
        while len(begun) < prompts:
            begun |= {answer.request_id for answer in engine.step()}
        llm.collective_rpc(_begin_profile)
    for _ in range(_PROFILED_STEPS if decodes else prompts):
        if engine.has_unfinished_requests():
            engine.step()
    shares: dict[str, Any] = llm.collective_rpc(_end_profile)[0]
    while engine.has_unfinished_requests():
        engine.step()
    return shares


def _begin_profile(worker: Any) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    worker.allocated = torch.cuda.memory_stats()["num_device_alloc"]
    worker.kernel_profile = profile(activities=[ProfilerActivity.CUDA])
    worker.kernel_profile.start()


def _end_profile(worker: Any) -> dict[str, Any]:
    import torch

    torch.accelerator.synchronize()
    worker.kernel_profile.stop()
    allocated = torch.cuda.memory_stats()["num_device_alloc"] - worker.allocated
    return shares_of(kernels_of(worker.kernel_profile)) | {"allocated": allocated}


def kernels_of(profiled: Any) -> Iterator[tuple[float, float, str]]:
    """Begin, end and name of each kernel in a profile of torch's."""
    for event in profiled.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            yield event.time_range.start, event.time_range.end, event.name


def shares_of(kernels: Iterable[tuple[float, float, str]]) -> dict[str, Any]:
    """Shares of the time from the first kernel to the last.

    Args:
        kernels: Begin and end of each, in any unit, and its name.

    Returns:
        `owners`: the share of each, and of the time in which no kernel runs. `most`: of the kernels
        that take most. `idle`: of the time in which none runs before these.
    """
    owners: Counter[str] = Counter()
    names: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    ordered = sorted(kernels)
    until = ordered[0][0]
    for begin, end, name in ordered:
        wait = max(0.0, begin - until)
        owners["idle"] += wait
        waits[name[:120]] += wait
        until = max(until, end)
        owner = next((what for what, known in _OWNERS.items() if re.search(known, name)), "rest")
        owners[owner] += end - begin
        names[f"{owner}: {name[:120]}"] += end - begin
    span = until - ordered[0][0]
    most = {"owners": owners, "most": names, "idle": waits}
    return {
        key: {name: round(time / span, 4) for name, time in taken.most_common(_NAMED)}
        for key, taken in most.items()
    }


def _requests(
    llm: Any, prompts: int, length: int, output: int, seed: object
) -> tuple[list[dict[str, list[int]]], Any]:
    """Random prompts, and how they are answered."""
    from vllm import SamplingParams

    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    batch = []
    for number in range(prompts):
        rng = random.Random(f"{prompts}x{length}->{output} {number} {seed}")
        batch.append({"prompt_token_ids": [rng.randrange(words) for _ in range(length)]})
    return batch, SamplingParams(
        max_tokens=output, temperature=0, ignore_eos=True, detokenize=False
    )
