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
    "GEMM": r"nvjet|cublas|cutlass|gemm|_swiglu|gemv",
}
# The same, and what the rest is in models that are not compiled, and in FP8.
PURPOSES_OF_FP8 = {
    "Inductor": r"^triton_",  # its names have those of what they fuse
    **_PURPOSES,
    "norm": r"rms_norm_kernel|\b_norm_rows\b",
    "SwiGLU": r"act_and_mul|\b_silu_mul\b|\b_gated_rows\b",
    "quantizing": r"quant",
}
REST = "rest"

# Steps of a phase that are skipped, and the steps after them that are traced.
_SKIPPED, TRACED_STEPS = 1, 4


def kernel_times(llm: Any, batches: Sequence[Batch]) -> dict[str, dict[str, list[float]]]:
    """Trace a step of each batch: of prefill if it asks for one token, else of decode.

    Returns:
        {batch: {kernel: [launches per step, microseconds per step]}}, the longest first.
    """
    return {batch.name: per_step(traced_steps(llm, batch)) for batch in batches}


def traced_steps(llm: Any, batch: Batch) -> list[tuple[str, float, float]]:
    """The kernels of TRACED_STEPS steps of a batch: name, start and end in microseconds."""
    tokens, prompts = batch.prompts, batch.prompts
    output = 64  # long enough that all prompts decode at once
    if batch.is_prefill:
        tokens = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        # Enough prompts for whole steps.
        prompts = (_SKIPPED + TRACED_STEPS + 2) * tokens // batch.length + 1
        output = 1
    llm.collective_rpc(_watch, args=(tokens,))
    generate(llm, prompts, batch.length, output, "trace")
    events: list[tuple[str, float, float]] = llm.collective_rpc(_traced)[0]
    return events


def per_step(events: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """{kernel: [launches per step, microseconds per step]} of `traced_steps`, longest first."""
    longest_first = sorted(alone(events).items(), key=lambda kernel: -kernel[1][1])
    return {
        name: [launches / TRACED_STEPS, round(microseconds / TRACED_STEPS, 1)]
        for name, (launches, microseconds) in longest_first
    }


def by_purpose(
    kernels: Mapping[str, Sequence[float]], purposes: Mapping[str, str] = _PURPOSES
) -> dict[str, float]:
    """Microseconds per step for each purpose, from the `kernel_times` of one batch."""
    times = dict.fromkeys((*purposes, REST), 0.0)
    for name, (_, microseconds) in kernels.items():
        fits = (what for what, pattern in purposes.items() if re.search(pattern, name))
        times[next(fits, REST)] += microseconds
    return {what: round(time, 1) for what, time in times.items()}


def gaps(events: Iterable[tuple[str, float, float]]) -> list[float]:
    """Microseconds in which nothing ran, between the first and the last of `traced_steps`."""
    found, busy_until = [], float("inf")
    for _, start, end in sorted(events, key=lambda event: event[1]):
        if start > busy_until:
            found.append(start - busy_until)
        busy_until = end if busy_until == float("inf") else max(busy_until, end)
    return found


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
            elif seen == _SKIPPED + TRACED_STEPS:
                torch.cuda.synchronize()
                profiler.stop()
                worker.execute_model = execute
            seen += 1
        return execute(scheduled, *args, **named)

    worker.execute_model = counted


def _traced(worker: Any) -> list[tuple[str, float, float]]:
    """The kernels of the traced steps."""
    from torch.autograd import DeviceType

    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in worker.profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
