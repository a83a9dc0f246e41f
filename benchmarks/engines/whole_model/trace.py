"""Kernel times of one step of each phase, from CUPTI.

They show where the time above the ideal goes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.engine_batches import generate
from benchmarks.engines.whole_model.models import Batch

# The purpose of a kernel: the first pattern that its name matches. The rest of a step is norms,
# activations and, in compiled models, rotations; Inductor's names do not tell them apart.
_PURPOSES = {
    "rotating, caching": r"\b_rotate\b|\b_write\b|reshape_and_cache",
    "attention": r"flash::|flash_fwd|FlashAttention|split_kv|\bmerge\b|\b_gather\b|\b_copy\b|fmha",
    "GEMM": r"nvjet|cublas|cutlass|gemm|_swiglu|by_matrix|by_vector",
}
_REST = "rest"

# Steps of a phase that are skipped, and the steps after them that are traced.
_SKIPPED, _TRACED = 1, 4


def kernel_times(llm: Any, batches: Sequence[Batch]) -> dict[str, dict[str, list[float]]]:
    """Trace a step of each batch: of prefill if it asks for one token, else of decode.

    Returns:
        {batch: {kernel: [launches per step, microseconds per step]}}.
    """
    most = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    traced = {}
    for batch in batches:
        tokens, prompts = batch.prompts, batch.prompts
        output = 64  # long enough that all prompts decode at once
        if batch.is_prefill:
            # Enough prompts for whole steps.
            tokens, prompts = most, (_SKIPPED + _TRACED + 2) * most // batch.length + 1
            output = 1
        llm.collective_rpc(_watch, args=(tokens,))
        generate(llm, prompts, batch.length, output, "trace")
        traced[batch.name] = llm.collective_rpc(_traced)[0]
    return traced


def by_purpose(kernels: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Microseconds per step for each purpose, from the `kernel_times` of one batch."""
    times = dict.fromkeys((*_PURPOSES, _REST), 0.0)
    for name, (_, microseconds) in kernels.items():
        fits = (what for what, pattern in _PURPOSES.items() if re.search(pattern, name))
        times[next(fits, _REST)] += microseconds
    return {what: round(time, 1) for what, time in times.items()}


def alone(kernels: Iterable[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """{name: (launches, time)} of kernels (name, start, end); times add up to the busy time.

    A kernel that starts before another one ends counts from that end on.
    """
    times: dict[str, tuple[int, float]] = {}
    busy_until = float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        launches, time = times.get(name, (0, 0.0))
        times[name] = launches + 1, time + max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return times


# ---- in vLLM's worker -------------------------------------------------------------------------


def _watch(worker: Any, tokens: int) -> None:
    """Trace the steps of `tokens` tokens from now on, except the first ones."""
    import torch

    execute, seen = worker.execute_model, 0
    activities = [torch.profiler.ProfilerActivity.CUDA]
    worker.profiler = profiler = torch.profiler.profile(activities=activities)

    def counted(scheduled: Any, *args: Any, **named: Any) -> Any:
        nonlocal seen
        if scheduled.total_num_scheduled_tokens == tokens:
            if seen == _SKIPPED:
                torch.cuda.synchronize()
                profiler.start()
            elif seen == _SKIPPED + _TRACED:
                torch.cuda.synchronize()
                profiler.stop()
                worker.execute_model = execute
            seen += 1
        return execute(scheduled, *args, **named)

    worker.execute_model = counted


def _traced(worker: Any) -> dict[str, list[float]]:
    """The kernels of a step, the longest first."""
    from torch.autograd import DeviceType

    times = alone(
        (event.name, event.time_range.start, event.time_range.end)
        for event in worker.profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    longest_first = sorted(times.items(), key=lambda kernel: -kernel[1][1])
    return {
        name: [launches / _TRACED, round(microseconds / _TRACED, 1)]
        for name, (launches, microseconds) in longest_first
    }
