"""Writes stats.safetensors, layer by layer.

This is why the file is laid out here and not by safetensors: the header is known beforehand, and a
calibration that was stopped after k layers leaves a file with k whole layers, and continues with
layer k.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_gac.checkpoint.atomic_files import tensors_header
from vllm_gac.compression.measured import LayerStats, Measured
from vllm_gac.compression.statistics_file import dtype_of
from vllm_gac.errors import DiskError
from vllm_gac.layout.dims import ModelLayout

_DTYPES = {"F32": torch.float32, "I32": torch.int32}
# Rows of a covariance that are copied from the device at a time.
_ROWS = 512


@dataclass(frozen=True, slots=True)
class StatsFile:
    """A statistics file that is being written.

    Attributes:
        path: The file.
        header: Its safetensors header.
        layers: The model's number of layers.
        layer_bytes: Bytes of the tensors of one layer.
        last: Names of the tensors that follow the layers.
        size: Bytes of the complete file.
    """

    path: Path
    header: bytes
    layers: int
    layer_bytes: int
    last: Sequence[str]
    size: int

    @property
    def begun(self) -> bool:
        """Whether the file is on disk, begun by this calibration and no other."""
        try:
            with self.path.open("rb") as file:
                return file.read(len(self.header)) == self.header
        except FileNotFoundError:
            return False

    @property
    def whole(self) -> bool:
        """Whether all of this calibration is on disk."""
        return self.path.is_file() and self.begun and self.path.stat().st_size == self.size

    def whole_layers(self) -> int:
        """How many layers are on disk, in a file that was `begun`."""
        size = self.path.stat().st_size - len(self.header)
        return min(self.layers, size // self.layer_bytes)

    def start(self) -> None:
        """Write the header alone."""
        self._write(0, [self.header])

    def append(self, index: int, stats: LayerStats) -> None:
        """Write what was measured of layer `index` after the layers before it.

        Squares are packed. A layer that was written only in part is overwritten.
        """
        pieces = (piece for tensor in stats.values() for piece in _pieces(tensor))
        self._write(len(self.header) + index * self.layer_bytes, pieces)

    def finish(self, measured: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of `Measured.whole_model_shapes` after the last layer."""
        end = len(self.header) + self.layers * self.layer_bytes
        pieces = (
            measured[name].to("cpu", _DTYPES[dtype_of(name)]).contiguous() for name in self.last
        )
        self._write(end, (piece.numpy().tobytes() for piece in pieces))

    def _write(self, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        try:
            with self.path.open("rb+" if offset else "wb") as file:
                file.truncate(file.seek(offset))
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise DiskError(f"{self.path}: cannot be written ({e.strerror or e})") from e


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a vector, or of the upper triangle of a matrix, in pieces of limited size."""
    if tensor.ndim == 1:
        yield tensor.to("cpu", torch.float32).numpy().data
        return
    for start in range(0, len(tensor), _ROWS):
        rows = tensor[start : start + _ROWS, start:].to(torch.float32)
        yield rows[torch.ones_like(rows, dtype=torch.bool).triu_()].cpu().numpy().data


def stats_file(path: Path, layout: ModelLayout, measured: Measured) -> StatsFile:
    """The statistics file at `path` for a model of `layout`; nothing is written yet."""
    shapes, last = measured.shapes(layout), measured.whole_model_shapes(layout)
    entries = {name: (dtype_of(name), shape) for name, shape in shapes.items()}
    header = tensors_header(entries, measured.metadata)
    numbers, of_last = (sum(map(math.prod, some.values())) for some in (shapes, last))
    layers = len(layout.layers)
    layer_bytes = 4 * (numbers - of_last) // layers
    return StatsFile(path, header, layers, layer_bytes, tuple(last), len(header) + 4 * numbers)
