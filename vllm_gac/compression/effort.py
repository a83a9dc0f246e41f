"""The memory and disk that a calibration needs, from the shapes, said before it begins.

On an H200 a model of Llama-3-8B's shape took 19.9 GiB of memory where the estimate was 19 GiB. The
time is not foretold: the progress bars show what each pass still takes.
"""

import math
from dataclasses import dataclass

import torch

from vllm_gac.layout.dims import ModelLayout


@dataclass(frozen=True, slots=True)
class Work:
    """What a calibration measures.

    Attributes:
        layout: The dense model's layout.
        tokens: Tokens of the calibration text.
        covariances: The side n of each covariance [n, n] of a layer.
        probes: Probes per layer.
        probe_tokens: Tokens that each probe runs on.
        metrics: The side n of each metric [n, n] of a layer.
        metric_tokens: Tokens that they are measured on.
        file_bytes: Size of the statistics file.
    """

    layout: ModelLayout
    tokens: int
    covariances: tuple[int, ...]
    probes: int
    probe_tokens: int
    metrics: tuple[int, ...]
    metric_tokens: int
    file_bytes: int

    @property
    def device_bytes(self) -> int:
        """Most bytes on the device: one layer, its covariances, an inverse, and the probes."""
        states = len(self.layout.layers) * self.probes * self.probe_tokens * self._state_bytes
        largest = max(self.covariances, default=0)
        head = 4 * self.layout.vocab_size * self.layout.hidden_size
        squares = (*self.covariances, *self.metrics)
        covariances = 8 * sum(n * n for n in squares) + 24 * largest**2
        return 4 * _parameters(self.layout) + covariances + states + head

    @property
    def host_bytes(self) -> int:
        """Most bytes in host memory: hidden states.

        Those that enter and leave a layer, or, for the metrics, of all layers.
        """
        states = max(3 * self.tokens, (len(self.layout.layers) + 2) * self.metric_tokens)
        return states * self._state_bytes + 4 * max(self.covariances, default=0) ** 2

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk: the statistics, metrics, and hidden states around a layer."""
        metrics = 4 * len(self.layout.layers) * sum(n * n for n in self.metrics)
        return self.file_bytes + metrics + 2 * self.tokens * self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return 4 * self.layout.hidden_size


def announcement(work: Work, device: str) -> str:
    """One line about the text, the device, the memory and the disk."""
    on_gpu = torch.device(device).type != "cpu"
    where = f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else "the CPU"
    memory = f"{_giga(work.host_bytes)} GB of memory"
    if on_gpu:
        memory = f"{_giga(work.device_bytes)} GB of the GPU's memory, {memory}"
    else:
        memory = f"{_giga(work.device_bytes + work.host_bytes)} GB of memory"
    return (
        f"calibrating on {where}, {work.tokens:,} tokens{per_channel(work.layout, work.tokens)}: "
        f"takes about {memory} and {_giga(work.disk_bytes)} GB of disk"
    )


def per_channel(layout: ModelLayout, tokens: int) -> str:
    """How many tokens there are for each channel of an MLP; nothing of experts is measured."""
    if layout.experts:
        return ""
    return f", {tokens / layout.layers[0].intermediate_size:.1f} for each channel of an MLP"


def _parameters(layout: ModelLayout) -> int:
    """The number of weights in one layer."""
    return sum(math.prod(shape) for _, shape in layout.layer_tensors(0))


def _giga(count: int) -> str:
    return f"{max(count / 1e9, 0.1):.1f}"
