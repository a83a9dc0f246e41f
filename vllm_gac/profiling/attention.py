"""The sweep of torch's attention that shows which head sizes are fast."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_gac.gpu.profile import AttentionSweep
from vllm_gac.profiling.timing import microseconds, random_tensor

HEAD_SIZES = tuple(range(64, 161))
_BATCH, _LENGTH, _HEADS = 4, 2048, 32


def measure_attention(sizes: Sequence[int], tick: Callable[[], object]) -> list[AttentionSweep]:
    """One sweep over head sizes. `tick` is called after each."""
    times = []
    for size in sizes:
        q, k, v = random_tensor(3, _BATCH, _HEADS, _LENGTH, size, dtype=torch.float16)
        times.append(round(microseconds(partial(scaled_dot_product_attention, q, k, v)), 1))
        tick()
    sweep = AttentionSweep(
        kernel="torch scaled_dot_product_attention",
        batch=_BATCH,
        length=_LENGTH,
        heads=_HEADS,
        causal=False,
        dims=list(sizes),
        microseconds=times,
    )
    return [sweep]
