"""stats.safetensors: the statistics that calibration measures of every layer, all fp32 but text.

layers.{i}.{linear}       [n * (n + 1) / 2] the covariance [n, n] of an input of the layer, as its
                          upper triangle, row after row. The inputs are those that the methods
                          need, of q_proj (shared by k_proj and v_proj), o_proj, gate_proj (shared
                          by up_proj) and down_proj. The input of o_proj spans `value_group`
                          neighbouring value heads, as many as may be merged:
                          n = query_heads * value_group * head_dim
                          The input of q_proj has one more number, which is always 1, if q_proj has
                          a bias: n = hidden_size + 1
layers.{i}.metric.{linear} the metric of the output of a linear (output_metrics.py), packed in the
                          same way: [out, out], of gate_proj and up_proj [in, in]
layers.{i}.normed_keys     the covariance of all keys [n, n], n = KV heads * head_dim, packed; and
layers.{i}.query_energy    [KV heads * head_dim / 2] of each pair of queries: both of models with
                          q_norm and k_norm only (methods/heads/normed_keys.py)
layers.{i}.errors.{name}  [full + 1] the error of a method at every dim (methods/base.py)
layers.{i}.probes         [probes, sequences] what each probe loses on text that was set aside, in
                          nats per token of each sequence (probes.py)
tokens                    int32 [count, length], the text that was fitted to: compressed layers are
                          refitted on what they get for it (refit.py)
held                      int32 [count, length], text that was set aside, on which models are
                          measured

In the metadata, "format" is 4; "covariances" and "metrics" name the linear layers that have them.
Format 3 has no text set aside. Instead of the probes of layers it has probes [layers, probes, 2],
how much the whole model diverges and how much its loss grows, on text that was fitted to. Before
each probe comes a stronger one of the same part.

It is laid out here and not by safetensors, because the header is known beforehand: a calibration
that was stopped after k layers leaves a file with k whole layers, and continues with layer k. Of
what is read, nothing is believed.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gac.checkpoint.atomic_files import tensors_header
from vllm_gac.checkpoint.headers import open_safetensors
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.measured import (
    HELD,
    PROBES,
    TOKENS,
    LayerStats,
    Measured,
    making,
    needed_by,
    to_measure,
)
from vllm_gac.compression.methods.statistics import NORMED_KEYS, QUERY_ENERGY, metric_of
from vllm_gac.errors import CheckpointError, DiskError, PlanError, VersionError
from vllm_gac.layout.dims import ModelLayout

Floats: TypeAlias = NDArray[np.float32]

FORMAT = "4"
_READ = ("3", FORMAT)
# Rows of a covariance that are looked at at a time, and that are copied from the device.
_ROWS, _COPIED_ROWS = 256, 512
_DTYPES = {"F32": torch.float32, "I32": torch.int32}
# Relative rounding error of fp32 sums over any realistic number of tokens.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a dense model, as their header says; numbers are checked when they are read.

    Attributes:
        path: The statistics file.
        model: The dense model.
        measured: What they are.
    """

    path: Path
    model: Checkpoint
    measured: Measured

    def check_target(self, target: ModelLayout) -> None:
        """Raise CheckpointError unless they suffice to make `target` of the model."""
        measured, layout = self.measured, self.model.layout
        methods = measured.metadata["methods"]
        needed, factorized = needed_by(making(layout, target))
        if missing := [name for name in needed if name not in measured.covariances]:
            raise CheckpointError(
                f"{self.path}: calibrated for {methods}, so that nothing is known of the input of "
                f"{', '.join(missing)}, which the plan shrinks; calibrate again with --method"
            )
        if set(factorized) - set(measured.metrics):
            raise CheckpointError(
                f"{self.path}: calibrated for {methods}, so that nothing is known of the output of "
                f"{', '.join(factorized)}, which the plan factorizes; calibrate again with --method"
            )
        group = max(layout.kv_heads_per(layer.value) for layer in target.layers)
        if measured.value_group % group:
            raise CheckpointError(
                f"{self.path}: measured for {measured.value_group} value heads at a time, {group} "
                "are to be made one; calibrate again"
            )

    def check_methods(self, methods: Sequence[str]) -> None:
        """Raise PlanError unless `methods` can be planned with them."""
        measured = self.measured
        if not measured.probe_tokens:
            raise PlanError(f"{self.path}: no sensitivities were measured; calibrate again")
        if missing := sorted(set(methods) - set(measured.methods)):
            raise PlanError(
                f"{self.path}: calibrated for {measured.metadata['methods']}, not for "
                f"{', '.join(missing)}; calibrate again with --method"
            )
        _, metrics = needed_by(to_measure(self.model.layout, methods, measured.value_group))
        if metrics and not measured.metrics:
            raise PlanError(
                f"{self.path}: nothing was measured of the outputs of linears, which "
                f"{', '.join(methods)} need; calibrate again"
            )

    def layer(self, index: int, device: str) -> LayerStats:
        """The covariances, metrics and energies of layer `index` as measured, fp64 on `device`.

        Raises CheckpointError if one of the first two is no covariance, or an energy is negative.
        """
        stats = {}
        with _opened(self.path, "pt") as file:
            is_normed = f"layers.{index}.{QUERY_ENERGY}" in file.keys()  # noqa: SIM118
            squares = [*self.measured.covariances, *map(metric_of, self.measured.metrics)]
            for name in [*squares, NORMED_KEYS] if is_normed else squares:
                tensor = _square(file.get_tensor(f"layers.{index}.{name}"), device)
                if fault := _covariance_fault(tensor):
                    raise CheckpointError(
                        f"{self.path}: layers.{index}.{name}: {fault}; calibrate again"
                    )
                stats[name] = tensor
            if is_normed:
                name = f"layers.{index}.{QUERY_ENERGY}"
                energy = file.get_tensor(name).to(device, torch.float64)
                if not bool((energy >= 0).all()) or not bool(energy.isfinite().all()):
                    raise CheckpointError(
                        f"{self.path}: {name}: not finite and at least 0; calibrate again"
                    )
                stats[QUERY_ENERGY] = energy
        return stats

    def tokens(self, name: str = TOKENS) -> torch.Tensor:
        """The text that was fitted to, or with HELD the one set aside, int32 [count, length].

        Raises CheckpointError if the sequences are longer than the model's context, or the model
        has no such token.
        """
        longest = self.model.config.max_position_embeddings
        if (length := self.measured.sequence_length) > longest:
            raise CheckpointError(
                f"{self.path}: metadata: sequence_length: {length}, more than the {longest} tokens "
                "of the model's context; calibrate again"
            )
        with _opened(self.path, "pt") as file:
            tokens: torch.Tensor = file.get_tensor(name)
        smallest, largest = (int(bound) for bound in tokens.aminmax())
        known = self.model.layout.vocab_size
        if smallest < 0 or largest >= known:
            raise CheckpointError(
                f"{self.path}: {name}: {smallest} to {largest}, the model has 0 to {known - 1}; "
                "calibrate again"
            )
        return tokens

    def errors(self) -> list[dict[str, Floats]]:
        """The errors of every method by its name, for every layer.

        Raises CheckpointError if one is negative or not finite.
        """
        names = [c.name for c in self.measured.compressors(self.model.layout)]
        return [
            {name: self._read(f"layers.{index}.errors.{name}", minimum=0.0) for name in names}
            for index in range(len(self.model.layout.layers))
        ]

    def probes(self) -> Floats:
        """The expected losses of probes [layers, probes, sequences] (probes.py), nats per token.

        Statistics without text set aside have one number for all sequences. Raises CheckpointError
        if one is not finite.
        """
        if not self.measured.held_tokens:
            return self._read(PROBES)[:, 1::2, :1]
        layers = range(len(self.model.layout.layers))
        return np.stack([self._read(f"layers.{index}.{PROBES}") for index in layers])

    def _read(self, name: str, minimum: float | None = None) -> Floats:
        with _opened(self.path, "np") as file:
            measured: Floats = file.get_tensor(name)
        if not np.isfinite(measured).all():
            raise CheckpointError(f"{self.path}: {name}: contains NaN or infinity; calibrate again")
        if minimum is not None and measured.size and measured.min() < minimum:
            raise CheckpointError(f"{self.path}: {name}: less than {minimum}; calibrate again")
        return measured


def open_statistics(path: Path, model: Checkpoint) -> Statistics:
    """Open the statistics of a dense model.

    Raises:
        CheckpointError: They are unreadable, incomplete, or of another model.
        VersionError: They have a format that this release does not read.
    """
    with _opened(path, "np") as file:
        metadata: dict[str, str] = dict(file.metadata() or {})
        entries = {name: _entry(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    if "model_config_sha256" not in metadata:
        raise CheckpointError(f"{path}: not statistics that 'vllm-gac calibrate' wrote")
    if (found_format := metadata.get("format", "1")) not in _READ:
        raise VersionError(
            f"{path}: statistics of format {found_format[:20]!r}, this release reads "
            f"{' and '.join(_READ)}; calibrate again"
        )
    # Older statistics know the model's config.json only.
    identity = model.identity.items()
    if differing := [key for key, value in identity if metadata.get(key, value) != value]:
        what = "config.json" if "model_config_sha256" in differing else "weights"
        raise CheckpointError(
            f"{path}: measured on another model ({what}: differs); calibrate this one"
        )
    try:
        measured = Measured.of(metadata)
    except ValueError as e:
        raise CheckpointError(f"{path}: metadata: {e}; calibrate again") from e
    for name, shape in measured.shapes(model.layout).items():
        expected = (dtype_of(name), shape)
        if entries.get(name) != expected:
            raise CheckpointError(
                f"{path}: {name}: {_describe(entries.get(name))}, expected {_describe(expected)}; "
                "calibrate again"
            )
    return Statistics(path, model, measured)


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


def stats_file(path: Path, layout: ModelLayout, measured: Measured) -> StatsFile:
    """The statistics file at `path` for a model of `layout`; nothing is written yet."""
    shapes, last = measured.shapes(layout), measured.whole_model_shapes(layout)
    entries = {name: (dtype_of(name), shape) for name, shape in shapes.items()}
    header = tensors_header(entries, measured.metadata)
    numbers, of_last = (sum(map(math.prod, some.values())) for some in (shapes, last))
    layers = len(layout.layers)
    layer_bytes = 4 * (numbers - of_last) // layers
    return StatsFile(path, header, layers, layer_bytes, tuple(last), len(header) + 4 * numbers)


def _square(packed: torch.Tensor, device: str) -> torch.Tensor:
    """The symmetric fp64 matrix on `device` whose upper triangle is `packed`."""
    size = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    packed, begin = packed.to(device), 0
    square = torch.zeros(size, size, device=device)
    for start in range(0, size, _ROWS):
        rows = square[start : start + _ROWS, start:]
        wanted = torch.ones_like(rows, dtype=torch.bool).triu_()
        count = rows.numel() - len(rows) * (len(rows) - 1) // 2
        rows.masked_scatter_(wanted, packed[begin : (begin := begin + count)])
    square = square.to(torch.float64)
    square += square.triu(1).T
    return square


def _covariance_fault(matrix: torch.Tensor) -> str | None:
    """Why `matrix` [n, n] is not a covariance; None if no fault is found.

    Each number is looked at once.
    """
    variances = matrix.diagonal()
    if not bool(matrix.sum().isfinite()):
        return "contains NaN or infinity"
    if float(variances.min()) < 0:
        return "a variance is negative"
    # |c_ij| <= sqrt(c_ii c_jj), up to the rounding of the sums.
    deviations = variances.sqrt()
    rounding = _ROUNDING * float(variances.max())
    for start in range(0, len(matrix), _ROWS):
        rows = slice(start, start + _ROWS)
        bound = deviations[rows, None] * deviations * (1 + _ROUNDING) + rounding
        if bool((matrix[rows].abs() > bound).any()):
            return "a covariance exceeds what its variances allow"
    return None


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a vector, or of the upper triangle of a matrix, in pieces of limited size."""
    if tensor.ndim == 1:
        yield tensor.to("cpu", torch.float32).numpy().data
        return
    for start in range(0, len(tensor), _COPIED_ROWS):
        rows = tensor[start : start + _COPIED_ROWS, start:].to(torch.float32)
        yield rows[torch.ones_like(rows, dtype=torch.bool).triu_()].cpu().numpy().data


def _opened(path: Path, framework: str) -> AbstractContextManager[Any]:
    return open_safetensors(path, "a readable statistics file", framework)


def dtype_of(name: str) -> str:
    """The dtype of a tensor of the file, by the name that safetensors has for it."""
    return "I32" if name in (TOKENS, HELD) else "F32"


def _entry(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a tensor."""
    return tensor.get_dtype(), tuple(tensor.get_shape())


def _describe(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])}"
