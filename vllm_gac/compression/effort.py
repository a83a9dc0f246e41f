"""The memory and disk that a calibration needs, from the shapes, said before it begins.

The time is not foretold: the progress bars show what each pass still takes.
"""

from dataclasses import dataclass

import torch

from vllm_gac.compression.backward import ROWS, layer_parameters
from vllm_gac.compression.measured import Measured, probes
from vllm_gac.compression.probes import DRAWS, positions
from vllm_gac.compression.reference_model import BATCH
from vllm_gac.layout.dims import ModelLayout

# Bytes of Python with torch and the tokenizer, measured.
_PROCESS = 530_000_000
# Of a GPU's memory, what torch and its libraries take beside what is counted: 7 % were measured.
_LIBRARIES = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """What a calibration measures.

    Attributes:
        layout: The dense model's layout.
        measured: What is measured of it.
        weight_bytes: Size of the model's weights.
        file_bytes: Size of the statistics file.
    """

    layout: ModelLayout
    measured: Measured
    weight_bytes: int
    file_bytes: int

    @property
    def passes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of hidden states, and beside them on the device, in a pass back and in the last.

        A pass back has the states of all layers and the gradients around one. It needs a layer and
        what autograd keeps of a batch; or the unembedding, and the shares of some tokens, also in
        fp64, with their sums. The last pass has the states around a layer. It needs the layer and
        a smaller one, covariances as measured, as used and of the layer before, and an inverse, a
        batch, or the unembedding for probes that are followed.
        """
        layout, of, layers = self.layout, self.measured, len(self.layout.layers)
        layer, metrics = 8 * layer_parameters(layout), sum(n * n for n in self._metrics)
        covariances = [n * n for n in of.covariance_sizes(layout)]
        head = layout.vocab_size * (4 * layout.hidden_size + 20 * ROWS)
        back = max((layers + 3) * of.metric_tokens, (layers + 1 + 2 * DRAWS) * of.probe_tokens)
        forward = 2 * (of.tokens + of.probe_tokens) * self._state_bytes
        probed = (DRAWS + 2) * self._gradients // DRAWS // layers
        follows = any(probe.followed for probe in probes(layout, of.methods))
        largest = max(24 * max(covariances, default=0), self._activations, head * follows)
        return (
            (back * self._state_bytes, max(layer + 8 * metrics + self._activations, head)),
            (forward, layer + 24 * (sum(covariances) + metrics) + largest + probed),
        )

    @property
    def copied_bytes(self) -> int:
        """Most bytes in host memory beside these: a covariance that is read or written."""
        return 4 * max(self.measured.covariance_sizes(self.layout), default=0) ** 2

    @property
    def resident_bytes(self) -> int:
        """Most bytes on a GPU on which hidden states and weights stay."""
        return max(map(sum, self.passes)) + self.weight_bytes

    def home(self, device: str, free: int) -> str:
        """Where these stay: on `device` if so many `free` bytes are enough, or on the CPU.

        A quarter is left to the allocator and to the text's batches.
        """
        return device if self.resident_bytes <= free * 3 // 4 else "cpu"

    @property
    def disk_bytes(self) -> int:
        """Most bytes on disk: statistics, metrics, gradients, and hidden states around a layer."""
        metrics = 4 * len(self.layout.layers) * sum(n * n for n in self._metrics)
        of = self.measured
        states = 2 * max(of.tokens + of.probe_tokens, DRAWS * of.probe_tokens) * self._state_bytes
        return self.file_bytes + metrics + self._gradients + states

    @property
    def _metrics(self) -> list[int]:
        return self.measured.metric_sizes(self.layout)

    @property
    def _activations(self) -> int:
        """Bytes that a layer needs for the gradients of a batch."""
        layout = self.layout
        heads = 10 * layout.num_attention_heads + 4 * layout.num_key_value_heads
        width = layout.layers[0].intermediate_size
        numbers = 12 * layout.hidden_size + heads * layout.head_dim + 6 * width
        return 4 * numbers * max(BATCH, self.measured.sequence_length)

    @property
    def _gradients(self) -> int:
        """Bytes of the gradients of all layers."""
        length = self.measured.sequence_length
        share = len(positions(length)) / length
        layers = len(self.layout.layers)
        return int(DRAWS * layers * share * self.measured.probe_tokens * self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        return 4 * self.layout.hidden_size


def announcement(work: Work, device: str, home: str) -> str:
    """One line about the text, the device, where hidden states stay, the memory and the disk."""
    on_gpu = torch.device(device).type != "cpu"
    where = f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else "the CPU"
    tokens = work.measured.tokens
    host = _PROCESS + work.copied_bytes
    if on_gpu:
        gpu = work.resident_bytes
        if home == "cpu":
            states, gpu = map(max, zip(*work.passes, strict=True))
            host += states
        taken = int(gpu * (1 + _LIBRARIES))
        memory = f"{_giga(taken)} GB of the GPU's memory, {_giga(host)} GB of memory"
    else:
        memory = f"{_giga(host + max(map(sum, work.passes)))} GB of memory"
    return (
        f"calibrating on {where}, {tokens:,} tokens{per_channel(work.layout, tokens)}: "
        f"takes about {memory} and {_giga(work.disk_bytes)} GB of disk"
    )


def per_channel(layout: ModelLayout, tokens: int) -> str:
    """How many tokens there are for each channel of an MLP; nothing of experts is measured."""
    if layout.experts:
        return ""
    return f", {tokens / layout.layers[0].intermediate_size:.1f} for each channel of an MLP"


def _giga(count: int) -> str:
    return f"{max(count / 1e9, 0.1):.1f}"
