"""stats.safetensors: the statistics that calibration measures of every layer, all fp32 but tokens.

layers.{i}.{linear}       [n * (n + 1) / 2] the covariance [n, n] of an input of the layer, as its
                          upper triangle, row after row. The inputs are those that the methods
                          need, of q_proj (shared by k_proj and v_proj), o_proj, gate_proj (shared
                          by up_proj) and down_proj. The input of o_proj spans `value_group`
                          neighbouring value heads, as many as may be merged:
                          n = query_heads * value_group * head_dim
                          The input of q_proj has one more number, which is always 1, if q_proj has
                          a bias (methods/biases.py): n = hidden_size + 1
layers.{i}.metric.{linear} the metric of the output of a linear (output_metrics.py), packed in the
                          same way: [out, out], of gate_proj and up_proj [in, in]
layers.{i}.pair_scores     [KV heads * head_dim / 2] of models with q_norm and k_norm only: E|q_f|^2
                          E|k_f|^2 of each pair of each key head after the norms, summed over the
                          query heads that share it (methods/normed_keys.py)
layers.{i}.errors.{name}  [full + 1] the error of a method at every dim (methods/base.py)
probes                    [layers, probes, 2] by how much the loss grows (probes.py)
tokens                    int32 [count, length], the text itself: compressed layers are refitted on
                          what they get for it (refit.py)

In the metadata, "format" is 3; "covariances" and "metrics" name the linears that have them.

The layers are appended one by one. This is why the file is laid out here and not by safetensors:
the header is known beforehand, and a calibration that was stopped after k layers leaves a file with
k whole layers, and continues with layer k.
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
from vllm_gac.compression.methods.base import MERGEABLE, Compressor
from vllm_gac.compression.methods.compress_layer import measurable_methods
from vllm_gac.compression.methods.lowrank import input_of
from vllm_gac.compression.methods.normed_keys import PAIR_SCORES
from vllm_gac.compression.methods.output_metric import metric_of, of_input
from vllm_gac.compression.probes import probes
from vllm_gac.compression.shrinkage import toward_diagonal
from vllm_gac.errors import CheckpointError, DiskError, PlanError, VersionError
from vllm_gac.layout.dims import LINEARS, ModelLayout
from vllm_gac.layout.schema import METHODS

# The fp64 covariance [n, n] of the input of each linear, by the linear's name. Beside them the
# metrics of outputs, by `metric_of`, and, of models with q_norm and k_norm, PAIR_SCORES.
LayerStats: TypeAlias = Mapping[str, torch.Tensor]
Floats: TypeAlias = NDArray[np.float32]

STATISTICS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
FORMAT = "3"
_TOKENS = "tokens"
_DTYPES = {"F32": torch.float32, "I32": torch.int32}
# Rows of a covariance that are copied from the device at a time.
_ROWS = 256
# Relative rounding error of fp32 sums over any realistic number of tokens.
_ROUNDING = 1e-3
_NEEDED_BY: Mapping[str, Sequence[str]] = {
    "heads": ("self_attn.q_proj", "self_attn.o_proj"),
    "prune": ("mlp.down_proj",),
    "lowrank": STATISTICS,
}


def largest_value_group(layout: ModelLayout) -> int:
    """How many value heads can be merged into one at most, in a model of `layout`."""
    return max(group for group in MERGEABLE if layout.num_key_value_heads % group == 0)


def layer_shapes(layout: ModelLayout, value_group: int) -> dict[str, tuple[int, int]]:
    """The shape of each covariance of a layer of a dense model."""
    attended = layout.num_attention_heads * value_group * layout.head_dim
    width = layout.layers[0].intermediate_size
    projected = layout.hidden_size + layout.qkv_bias
    sizes = (projected, attended, layout.hidden_size, width)
    return {name: (size, size) for name, size in zip(STATISTICS, sizes, strict=True)}


def covariances_of(methods: Sequence[str]) -> list[str]:
    """The linears whose input covariances `methods` need."""
    needed = {name for method in methods for name in _NEEDED_BY[method]}
    return [name for name in STATISTICS if name in needed]


def covariances_for(dense: ModelLayout, layout: ModelLayout) -> list[str]:
    """The linears whose input covariances are needed to make `layout` from `dense`."""
    needed = set()
    for before, after in zip(dense.layers, layout.layers, strict=True):
        if after.key != before.key:
            needed.add("self_attn.q_proj")
        if after.value != before.value:
            needed.add("self_attn.o_proj")
        if after.intermediate_size != before.intermediate_size:
            needed.add("mlp.down_proj")
        needed |= {input_of(linear) for linear in after.ranks}
    return [name for name in STATISTICS if name in needed]


def metric_shapes(layout: ModelLayout) -> dict[str, tuple[int, int]]:
    """The shape of the metric of each linear of a dense model."""
    sizes = {}
    for name in LINEARS:
        out, into = layout.linear_shape(layout.layers[0], name)
        sizes[name] = into if of_input(name) else out
    return {name: (size, size) for name, size in sizes.items()}


def metrics_of(methods: Sequence[str]) -> list[str]:
    """The linears whose metrics `methods` need."""
    return list(LINEARS) if "lowrank" in methods else []


def metrics_for(layout: ModelLayout) -> list[str]:
    """The linears whose metrics are needed to make `layout` of a dense model."""
    return [name for name in LINEARS if any(name in layer.ranks for layer in layout.layers)]


def kept_metrics(metadata: Mapping[str, str]) -> list[str]:
    """The linears whose metrics a file has."""
    kept = metadata.get("metrics", "").split(",")
    return [name for name in LINEARS if name in kept]


def kept_covariances(metadata: Mapping[str, str]) -> list[str]:
    """The linears whose input covariances a file has."""
    kept = metadata.get("covariances", "").split(",")
    return [name for name in STATISTICS if name in kept]


def measured_methods(layout: ModelLayout, metadata: Mapping[str, str]) -> list[Compressor]:
    """The methods whose errors a file has."""
    return list(measurable_methods(layout, methods_of(metadata), int(metadata["value_group"])))


def methods_of(metadata: Mapping[str, str]) -> list[str]:
    """The names of the methods that can be planned with a file: heads, prune, lowrank."""
    return [method for method in metadata.get("methods", "").split(",") if method]


def check_methods(path: Path, metadata: Mapping[str, str], methods: Sequence[str]) -> None:
    """Raise PlanError unless `methods` can be planned with the statistics at `path`."""
    known = methods_of(metadata)
    if missing := sorted(set(methods) - set(known)):
        raise PlanError(
            f"{path}: calibrated for {metadata['methods']}, not for {', '.join(missing)}; "
            "calibrate again with --method"
        )
    if "lowrank" in methods and not kept_metrics(metadata):
        raise PlanError(
            f"{path}: nothing was measured of the outputs of linears, which lowrank needs; "
            "calibrate again"
        )


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

    def whole_layers(self) -> int:
        """How many layers are on disk, in a file that was `begun`."""
        size = self.path.stat().st_size - len(self.header)
        return min(self.layers, size // self.layer_bytes)

    def start(self) -> None:
        """Write the header alone."""
        self._write(0, [self.header])

    def append(self, index: int, stats: LayerStats) -> None:
        """Write the statistics and errors of layer `index` after those of the layers before it.

        A layer that was written only in part is overwritten.
        """
        pieces = (piece for tensor in stats.values() for piece in _pieces(tensor))
        self._write(len(self.header) + index * self.layer_bytes, pieces)

    def finish(self, measured: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of `whole_model_shapes` after the last layer."""
        end = len(self.header) + self.layers * self.layer_bytes
        pieces = (
            measured[name].to("cpu", _DTYPES[_dtype(name)]).contiguous() for name in self.last
        )
        self._write(end, (piece.numpy().tobytes() for piece in pieces))

    def _write(self, offset: int, pieces: Iterable[bytes]) -> None:
        try:
            with self.path.open("rb+" if offset else "wb") as file:
                file.truncate(file.seek(offset))
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise DiskError(f"{self.path}: cannot be written ({e.strerror or e})") from e


def _pieces(tensor: torch.Tensor) -> Iterator[bytes]:
    """The bytes of a vector, or of the upper triangle of a matrix, in pieces of limited size."""
    if tensor.ndim == 1:
        yield tensor.to("cpu", torch.float32).numpy().tobytes()
        return
    for start in range(0, len(tensor), _ROWS):
        rows = tensor[start : start + _ROWS].to("cpu", torch.float32).numpy()
        for number, row in enumerate(rows, start):
            yield row[number:].tobytes()


def _square(packed: torch.Tensor, device: str) -> torch.Tensor:
    """The symmetric fp64 matrix on `device` whose upper triangle is `packed`."""
    size = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    upper, start = torch.zeros(size, size), 0
    for number in range(size):
        upper[number, number:] = packed[start : (start := start + size - number)]
    square = upper.to(device, torch.float64)
    square += square.triu(1).T
    return square


def stats_file(path: Path, layout: ModelLayout, metadata: Mapping[str, str]) -> StatsFile:
    """The statistics file at `path` for a model of `layout`; nothing is written yet.

    `metadata` says what is measured and how. Its "value_group" and "methods" determine
    shapes.
    """
    shapes = _shapes(layout, metadata)
    header = tensors_header({n: (_dtype(n), shape) for n, shape in shapes.items()}, metadata)
    layers, last = len(layout.layers), whole_model_shapes(layout, metadata)
    numbers, of_last = (sum(map(math.prod, some.values())) for some in (shapes, last))
    layer_bytes = 4 * (numbers - of_last) // layers
    return StatsFile(path, header, layers, layer_bytes, tuple(last), len(header) + 4 * numbers)


def _shapes(layout: ModelLayout, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the file, in the order of the file."""
    square = layer_shapes(layout, int(metadata["value_group"]))
    layer: dict[str, tuple[int, ...]] = {
        **{
            name: (square[name][0] * (square[name][0] + 1) // 2,)
            for name in kept_covariances(metadata)
        },
        **(
            {PAIR_SCORES: (layout.num_key_value_heads * layout.head_dim // 2,)}
            if layout.qk_norm
            else {}
        ),
        **{
            metric_of(name): (size * (size + 1) // 2,)
            for name, (size, _) in metric_shapes(layout).items()
            if name in kept_metrics(metadata)
        },
        **{f"errors.{c.name}": (c.full(layout) + 1,) for c in measured_methods(layout, metadata)},
    }
    shapes = {
        f"layers.{index}.{name}": shape
        for index in range(len(layout.layers))
        for name, shape in layer.items()
    }
    return shapes | whole_model_shapes(layout, metadata)


def whole_model_shapes(
    layout: ModelLayout, metadata: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is measured after all layers have been."""
    layers = len(layout.layers)
    length = int(metadata["sequence_length"])
    return {
        "probes": (layers, len(probes(layout, methods_of(metadata))), 2),
        _TOKENS: (int(metadata["tokens"]) // length, length),
    }


def check_stats(
    path: Path,
    layout: ModelLayout,
    config_sha256: str,
    value_group: int = 1,
    needed: Sequence[str] = (),
    factorized: Sequence[str] = (),
) -> dict[str, str]:
    """Check the statistics at `path`, and return their metadata.

    Args:
        path: The statistics file.
        layout: The dense model's layout.
        config_sha256: SHA-256 of the dense model's config.json.
        value_group: How many value heads are to be merged into one.
        needed: The linears whose input covariances are needed.
        factorized: The linears whose metrics are needed.

    Raises:
        CheckpointError: The statistics are unreadable, incomplete, of another model, or lack what
            is needed.
        VersionError: They have a format that this release does not read.
    """
    with _opened(path, "np") as file:
        metadata: dict[str, str] = dict(file.metadata() or {})
        found = {name: _entry(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    if "model_config_sha256" not in metadata:
        raise CheckpointError(f"{path}: not statistics that 'vllm-gac calibrate' wrote")
    if (found_format := metadata.get("format", "1")) != FORMAT:
        raise VersionError(
            f"{path}: statistics of format {found_format[:20]!r}, this release reads {FORMAT}; "
            "calibrate again"
        )
    if metadata.get("model_config_sha256") != config_sha256:
        raise CheckpointError(
            f"{path}: measured on another model (config.json differs); calibrate this one"
        )
    if fault := _metadata_fault(metadata):
        raise CheckpointError(f"{path}: metadata: {fault}; calibrate again")
    if missing := [name for name in needed if name not in kept_covariances(metadata)]:
        raise CheckpointError(
            f"{path}: calibrated for {metadata.get('methods')}, so that nothing is known of the "
            f"input of {', '.join(missing)}, which the plan shrinks; calibrate again with --method"
        )
    if set(factorized) - set(kept_metrics(metadata)):
        raise CheckpointError(
            f"{path}: calibrated for {metadata['methods']}, so that nothing is known of the output "
            f"of {', '.join(factorized)}, which the plan factorizes; calibrate again with --method"
        )
    measured = metadata["value_group"]
    if int(measured) % value_group:
        raise CheckpointError(
            f"{path}: measured for {measured} value heads at a time, {value_group} are to be made "
            "one; calibrate again"
        )
    for name, shape in _shapes(layout, metadata).items():
        expected = (_dtype(name), shape)
        if found.get(name) != expected:
            raise CheckpointError(
                f"{path}: {name}: {_said(found.get(name))}, expected {_said(expected)}; "
                "calibrate again"
            )
    return metadata


def _opened(path: Path, framework: str) -> AbstractContextManager[Any]:
    return open_safetensors(path, "a readable statistics file", framework)


def _dtype(name: str) -> str:
    """The dtype of a tensor of the file, by the name that safetensors has for it."""
    return "I32" if name == _TOKENS else "F32"


def _entry(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a tensor."""
    return tensor.get_dtype(), tuple(tensor.get_shape())


def _said(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if entry is None else f"{entry[0]} {list(entry[1])}"


def _metadata_fault(metadata: Mapping[str, str]) -> str | None:
    """What is wrong with the metadata; None if nothing is."""
    for key in ("methods", "value_group", "probe_tokens", "tokens", "sequence_length"):
        if key not in metadata:
            return f"{key}: missing"
    if not set(methods_of(metadata)) <= set(METHODS):
        return f"methods: expected some of {','.join(METHODS)}, got {metadata['methods'][:60]!r}"
    if metadata["value_group"] not in map(str, MERGEABLE):
        return f"value_group: expected one of {MERGEABLE}, got {metadata['value_group'][:60]!r}"
    for key in ("probe_tokens", "tokens", "sequence_length"):
        number = metadata[key]
        if not (number.isascii() and number.isdigit() and len(number) < 20):
            return f"{key}: expected a number, got {number[:60]!r}"
    tokens, length = int(metadata["tokens"]), int(metadata["sequence_length"])
    if not length:
        return "sequence_length: expected at least 1, got 0"
    if tokens < length:
        return f"tokens: expected one sequence of {length} at least, got {tokens}"
    return None


def read_layer_stats(path: Path, index: int, device: str) -> LayerStats:
    """The covariances, metrics and scores of layer `index` as measured, fp64 on `device`.

    Raises CheckpointError if one of the first two is not a covariance.
    """
    stats = {}
    with _opened(path, "pt") as file:
        metadata = file.metadata() or {}
        for name in (*kept_covariances(metadata), *map(metric_of, kept_metrics(metadata))):
            tensor = _square(file.get_tensor(f"layers.{index}.{name}"), device)
            if fault := _covariance_fault(tensor):
                raise CheckpointError(f"{path}: layers.{index}.{name}: {fault}; calibrate again")
            stats[name] = tensor
        if (scores := f"layers.{index}.{PAIR_SCORES}") in file.keys():  # noqa: SIM118
            stats[PAIR_SCORES] = file.get_tensor(scores).to(device, torch.float64)
            if not bool((stats[PAIR_SCORES] >= 0).all()) or not bool(
                stats[PAIR_SCORES].isfinite().all()
            ):
                raise CheckpointError(
                    f"{path}: {scores}: not finite and at least 0; calibrate again"
                )
    return stats


def shrink_covariances(stats: LayerStats, tokens: int) -> LayerStats:
    """Statistics of a layer, measured on so many `tokens`, as methods use them.

    Covariances are shrunk (shrinkage.py): the more, the fewer tokens there are.
    """
    return {
        name: toward_diagonal(matrix, tokens) if name in STATISTICS else matrix
        for name, matrix in stats.items()
    }


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
        most = deviations[rows, None] * deviations * (1 + _ROUNDING) + rounding
        if bool((matrix[rows].abs() > most).any()):
            return "a covariance exceeds what its variances allow"
    return None


def read_tokens(
    path: Path, metadata: Mapping[str, str], layout: ModelLayout, longest: int
) -> torch.Tensor:
    """The text that was measured, int32 [count, length].

    Args:
        path: The statistics file.
        metadata: From `check_stats`.
        layout: The dense model's layout.
        longest: Tokens of the model's context.

    Raises:
        CheckpointError: The sequences are longer than the context, or the model has no such token.
    """
    if (length := int(metadata["sequence_length"])) > longest:
        raise CheckpointError(
            f"{path}: metadata: sequence_length: {length}, more than the {longest} tokens of the "
            "model's context; calibrate again"
        )
    with _opened(path, "pt") as file:
        tokens: torch.Tensor = file.get_tensor(_TOKENS)
    least, most = (int(bound) for bound in tokens.aminmax())
    if least < 0 or most >= layout.vocab_size:
        raise CheckpointError(
            f"{path}: {_TOKENS}: {least} to {most}, the model has 0 to {layout.vocab_size - 1}; "
            "calibrate again"
        )
    return tokens


def read_errors(
    path: Path, layout: ModelLayout, metadata: Mapping[str, str]
) -> list[dict[str, Floats]]:
    """The errors of every method by its name, for every layer; `metadata` is from `check_stats`.

    Raises CheckpointError if one is negative or not finite.
    """
    names = [c.name for c in measured_methods(layout, metadata)]
    return [
        {name: _read(path, f"layers.{index}.errors.{name}", least=0.0) for name in names}
        for index in range(len(layout.layers))
    ]


def read_probes(path: Path) -> Floats:
    """The probes [layers, probes, 2] (probes.py). Raises CheckpointError if not finite."""
    return _read(path, "probes")


def _read(path: Path, name: str, least: float | None = None) -> Floats:
    with _opened(path, "np") as file:
        measured: Floats = file.get_tensor(name)
    if not np.isfinite(measured).all():
        raise CheckpointError(f"{path}: {name}: contains NaN or infinity; calibrate again")
    if least is not None and measured.min() < least:
        raise CheckpointError(f"{path}: {name}: less than {least}; calibrate again")
    return measured
