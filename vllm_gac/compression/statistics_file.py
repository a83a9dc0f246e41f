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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gac.checkpoint.headers import open_safetensors
from vllm_gac.compression.measured import (
    HELD,
    PROBES,
    TOKENS,
    LayerStats,
    Measured,
    covariances_of,
    making,
    metrics_of,
    to_measure,
)
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


def check_stats(
    path: Path,
    layout: ModelLayout,
    identity: Mapping[str, str],
    target: ModelLayout | None = None,
) -> Measured:
    """Check the statistics at `path`, and return what they are.

    Args:
        path: The statistics file.
        layout: The dense model's layout.
        identity: The dense model's; older statistics know its config.json only.
        target: What is to be made of the model; None: nothing that is known yet.

    Raises:
        CheckpointError: The statistics are unreadable, incomplete, of another model, or lack what
            is needed.
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
            f"{' and '.join(_READ)}; "
            "calibrate again"
        )
    if differing := [key for key, value in identity.items() if metadata.get(key, value) != value]:
        what = "config.json" if "model_config_sha256" in differing else "weights"
        raise CheckpointError(
            f"{path}: measured on another model ({what}: differs); calibrate this one"
        )
    try:
        measured = Measured.of(metadata)
    except ValueError as e:
        raise CheckpointError(f"{path}: metadata: {e}; calibrate again") from e
    used = making(layout, target) if target else []
    needed, factorized = covariances_of(used), metrics_of(used)
    if missing := [name for name in needed if name not in measured.covariances]:
        raise CheckpointError(
            f"{path}: calibrated for {metadata['methods']}, so that nothing is known of the "
            f"input of {', '.join(missing)}, which the plan shrinks; calibrate again with --method"
        )
    if set(factorized) - set(measured.metrics):
        raise CheckpointError(
            f"{path}: calibrated for {metadata['methods']}, so that nothing is known of the output "
            f"of {', '.join(factorized)}, which the plan factorizes; calibrate again with --method"
        )
    groups = [layout.kv_heads_per(layer.value) for layer in target.layers] if target else [1]
    if measured.value_group % (value_group := max(groups)):
        raise CheckpointError(
            f"{path}: measured for {measured.value_group} value heads at a time, {value_group} are "
            "to be made one; calibrate again"
        )
    for name, shape in measured.shapes(layout).items():
        expected = (dtype_of(name), shape)
        if entries.get(name) != expected:
            raise CheckpointError(
                f"{path}: {name}: {_describe(entries.get(name))}, expected {_describe(expected)}; "
                "calibrate again"
            )
    return measured


def check_methods(
    path: Path, measured: Measured, dense: ModelLayout, methods: Sequence[str]
) -> None:
    """Raise PlanError unless `methods` can be planned with the statistics at `path`."""
    if missing := sorted(set(methods) - set(measured.methods)):
        raise PlanError(
            f"{path}: calibrated for {measured.metadata['methods']}, not for {', '.join(missing)}; "
            "calibrate again with --method"
        )
    if not measured.metrics and metrics_of(to_measure(dense, methods, measured.value_group)):
        raise PlanError(
            f"{path}: nothing was measured of the outputs of linears, which "
            f"{', '.join(methods)} need; calibrate again"
        )


def read_layer_stats(path: Path, measured: Measured, index: int, device: str) -> LayerStats:
    """The covariances, metrics and energies of layer `index` as measured, fp64 on `device`.

    Raises CheckpointError if one of the first two is not a covariance, or an energy is negative.
    """
    stats = {}
    with _opened(path, "pt") as file:
        is_normed = f"layers.{index}.{QUERY_ENERGY}" in file.keys()  # noqa: SIM118
        squares = [*measured.covariances, *map(metric_of, measured.metrics)]
        for name in [*squares, NORMED_KEYS] if is_normed else squares:
            tensor = _square(file.get_tensor(f"layers.{index}.{name}"), device)
            if fault := _covariance_fault(tensor):
                raise CheckpointError(f"{path}: layers.{index}.{name}: {fault}; calibrate again")
            stats[name] = tensor
        if is_normed:
            name = f"layers.{index}.{QUERY_ENERGY}"
            energy = file.get_tensor(name).to(device, torch.float64)
            if not bool((energy >= 0).all()) or not bool(energy.isfinite().all()):
                raise CheckpointError(f"{path}: {name}: not finite and at least 0; calibrate again")
            stats[QUERY_ENERGY] = energy
    return stats


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


def read_tokens(
    path: Path, measured: Measured, layout: ModelLayout, longest: int, name: str = TOKENS
) -> torch.Tensor:
    """The text that was fitted to, or that was set aside, int32 [count, length].

    Args:
        path: The statistics file.
        measured: From `check_stats`.
        layout: The dense model's layout.
        longest: Tokens of the model's context.
        name: TOKENS or HELD.

    Raises:
        CheckpointError: The sequences are longer than the context, or the model has no such token.
    """
    if (length := measured.sequence_length) > longest:
        raise CheckpointError(
            f"{path}: metadata: sequence_length: {length}, more than the {longest} tokens of the "
            "model's context; calibrate again"
        )
    with _opened(path, "pt") as file:
        tokens: torch.Tensor = file.get_tensor(name)
    smallest, largest = (int(bound) for bound in tokens.aminmax())
    if smallest < 0 or largest >= layout.vocab_size:
        raise CheckpointError(
            f"{path}: {name}: {smallest} to {largest}, the model has 0 to {layout.vocab_size - 1}; "
            "calibrate again"
        )
    return tokens


def read_errors(path: Path, layout: ModelLayout, measured: Measured) -> list[dict[str, Floats]]:
    """The errors of every method by its name, for every layer; `measured` is from `check_stats`.

    Raises CheckpointError if one is negative or not finite.
    """
    names = [c.name for c in measured.compressors(layout)]
    return [
        {name: _read(path, f"layers.{index}.errors.{name}", minimum=0.0) for name in names}
        for index in range(len(layout.layers))
    ]


def read_probes(path: Path, layout: ModelLayout, measured: Measured) -> Floats:
    """The expected losses of probes [layers, probes, sequences] (probes.py), in nats per token.

    Statistics without text set aside have one number for all sequences. `measured` is from
    `check_stats`. Raises CheckpointError if one is not finite.
    """
    if not measured.held_tokens:
        return _read(path, PROBES)[:, 1::2, :1]
    layers = range(len(layout.layers))
    return np.stack([_read(path, f"layers.{index}.{PROBES}") for index in layers])


def _read(path: Path, name: str, minimum: float | None = None) -> Floats:
    with _opened(path, "np") as file:
        measured: Floats = file.get_tensor(name)
    if not np.isfinite(measured).all():
        raise CheckpointError(f"{path}: {name}: contains NaN or infinity; calibrate again")
    if minimum is not None and measured.size and measured.min() < minimum:
        raise CheckpointError(f"{path}: {name}: less than {minimum}; calibrate again")
    return measured


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
