"""An estimate of the time, memory and disk that a calibration needs, made before it begins.

Memory and disk follow from the shapes. Time is twice that of all matrix products, at the speed of
two small products that are timed on the device: on an H200 a model of Llama-3-8B's shape took twice
as long as its products, and 19.9 GiB of memory where the estimate was 19 GiB.
"""

import time
from dataclasses import dataclass

import torch

from vllm_gac.layout.dims import LINEARS, ModelLayout

_OVERHEAD = 2.0
# The speed of inverses and eigenvectors relative to products in fp64.
_SOLVING = 0.25
# Rows and columns of the products that are timed: tens of milliseconds on a core, one on a GPU.
_SIDE = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class Work:
    """What a calibration measures.

    Attributes:
        layout: The dense model's layout.
        tokens: Tokens of the calibration text.
        sequence_length: Tokens of one sequence.
        covariances: The side n of each covariance [n, n] of a layer.
        pruned: Whether the errors of pruned MLPs are measured.
        factorized: Whether the errors of low-rank linears are measured.
        probes: Probes per layer.
        probe_tokens: Tokens that each probe runs on.
        metrics: The side n of each metric [n, n] of a layer.
        metric_tokens: Tokens that they are measured on.
        file_bytes: Size of the statistics file.
    """

    layout: ModelLayout
    tokens: int
    sequence_length: int
    covariances: tuple[int, ...]
    pruned: bool
    factorized: bool
    probes: int
    probe_tokens: int
    metrics: tuple[int, ...]
    metric_tokens: int
    file_bytes: int

    @property
    def products(self) -> float:
        """fp32 operations: of the forward passes, the metrics, the covariances and the probes."""
        layers, layer = len(self.layout.layers), 2 * _parameters(self.layout)
        attention = (
            4 * self.sequence_length * self.layout.num_attention_heads * self.layout.head_dim
        )
        a_token = layer + attention + 2 * sum(n * n for n in self.covariances)
        # Forward twice, and backward once, which takes as long as forward twice.
        measured = self.metric_tokens * (4 * layer + 2 * sum(n * n for n in self.metrics))
        probed = self.probes * self.probe_tokens * layers
        unembedding = 2 * self.layout.vocab_size * self.layout.hidden_size
        streamed = layers * (self.tokens * a_token + measured)
        return streamed + probed * (layers / 2 * layer + unembedding)

    @property
    def solving(self) -> float:
        """fp64 operations: of measuring the errors of all dims of all layers."""
        layout, (dense, *_) = self.layout, self.layout.layers
        each = 3.0 * sum(n**3 for n in self.covariances[:2])
        if self.pruned:
            each += 8.0 * dense.intermediate_size**3
        if self.factorized:
            shapes = [layout.linear_shape(dense, name) for name in LINEARS]
            each += 3.0 * sum(2 * i * i * o + 10 * min(i, o) ** 3 for o, i in shapes)
        return len(layout.layers) * each

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
    """One line about the device, the time, the memory and the disk."""
    on_gpu = torch.device(device).type != "cpu"
    where = f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else "the CPU"
    memory = f"{_giga(work.host_bytes)} GB of memory"
    if on_gpu:
        memory = f"{_giga(work.device_bytes)} GB of the GPU's memory, {memory}"
    else:
        memory = f"{_giga(work.device_bytes + work.host_bytes)} GB of memory"
    time_taken = _duration(seconds(work, device))
    return (
        f"calibrating on {where}, {work.tokens:,} tokens, {tokens_per_channel(work)} for each "
        f"channel of an MLP: about {time_taken}, {memory} and "
        f"{_giga(work.disk_bytes)} GB of disk"
    )


def tokens_per_channel(work: Work) -> str:
    """How much text there is for what is fitted: tokens for each of an MLP's channels."""
    return f"{work.tokens / work.layout.layers[0].intermediate_size:.1f}"


def seconds(work: Work, device: str) -> float:
    """The estimated time, measured with the present speed of `device`."""
    products = work.products / _speed(device, torch.float32)
    return _OVERHEAD * (products + work.solving / (_SOLVING * _speed(device, torch.float64)))


def _speed(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product: the better of two tries."""
    side = _SIDE[torch.device(device).type]
    a = torch.ones(side, side, dtype=dtype, device=device)
    taken = []
    for _ in range(3):  # the first one warms up
        begun = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        taken.append(time.perf_counter() - begun)
    return 2 * side**3 / min(taken[1:])


def _parameters(layout: ModelLayout) -> int:
    """The number of weights in the linears of one layer."""
    shapes = (layout.linear_shape(layout.layers[0], name) for name in LINEARS)
    return sum(o * i for o, i in shapes)


def _giga(count: int) -> str:
    return f"{max(count / 1e9, 0.1):.1f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds, -1), 10):.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
