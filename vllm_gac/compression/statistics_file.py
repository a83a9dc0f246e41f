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

statistics_writer.py writes it. Here it is read, and nothing of it is believed.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gac.checkpoint.headers import open_safetensors
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.measured import (
    HELD,
    PROBES,
    TOKENS,
    LayerStats,
    Measured,
    needed_by,
    to_measure,
)
from vllm_gac.compression.methods.registry import making
from vllm_gac.compression.methods.statistics import NORMED_KEYS, QUERY_ENERGY, metric_of
from vllm_gac.errors import CheckpointError, PlanError, VersionError
from vllm_gac.layout.dims import ModelLayout

Floats: TypeAlias = NDArray[np.float32]

FORMAT = "4"
_READ = ("3", FORMAT)
# Rows of a covariance that are looked at at a time.
_ROWS = 256
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
    if not float(variances.max()) > 0:
        return "all variances are zero"
    # |c_ij| <= sqrt(c_ii c_jj), up to the rounding of the sums.
    deviations = variances.sqrt()
    rounding = _ROUNDING * float(variances.max())
    for start in range(0, len(matrix), _ROWS):
        rows = slice(start, start + _ROWS)
        bound = deviations[rows, None] * deviations * (1 + _ROUNDING) + rounding
        if bool((matrix[rows].abs() > bound).any()):
            return "a covariance exceeds what its variances allow"
    return None


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
