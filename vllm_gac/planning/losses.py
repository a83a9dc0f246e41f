"""The expected loss of every dim of every layer, in nats per token.

A method has an error at every dim (compression/methods/base.py). Probes measure the loss at two of
these errors (compression/probes.py). The loss at a dim is
`strong * (error / error of the stronger probe) ** power`, where `strong` is the loss of the
stronger probe. The weaker probe determines the power, which is at least 1. Errors are convex, so
losses are convex too, and no plan removes everything from one layer. The errors of low-rank
linear layers are losses by themselves, as far as the metrics of their outputs tell
(compression/methods/lowrank.py); probes correct them by one factor for all linear layers of a part.

Whole models, in which every layer has the weaker probe of a part, lose other than the sum of their
probes. That factor scales the losses of the part.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_gac.compression.measured import Measured
from vllm_gac.compression.probes import PARTS, Part, Probe, probes, whole_sequences
from vllm_gac.compression.statistics_file import read_errors, read_probes, read_whole
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# [full + 1]: the loss at a dim of 0, 1, ..., full. The last one is 0.
Curve: TypeAlias = NDArray[np.float64]
# Of each layer, curves by the name of the method that has them (`part_of`): rotary1, latent2 or
# value1 by the size of a head made of so many, width by the MLP's width, rank.mlp.up_proj by the
# rank of a linear.
Losses: TypeAlias = Sequence[Mapping[str, Curve]]

# Powers are clipped to this range, because two probes of a part are noisy.
_POWERS = (1.0, 2.0)
_MIN_LOSS = 1e-12
# A whole model loses at most so many times what its probes do, or so much less.
_MAX_SCALE = 10.0


def part_of(name: str) -> Part:
    """The part of a layer that a method compresses.

    Args:
        name: The method's name (`Compressor.name`), which is also that of its curves of errors and
            of losses: the part, and then how many heads become one, or the linear.

    Returns:
        The part, which has probes.

    Raises:
        ValueError: There are no probes for the method, so that nothing says what its errors cost.
    """
    for part in PARTS:
        if name.startswith(part):
            return part
    raise ValueError(f"{name}: begins with no part that has probes: {', '.join(PARTS)}")


def read_losses(path: Path, dense: ModelLayout, measured: Measured) -> Losses:
    """Read the losses from the statistics of a model.

    Args:
        path: The statistics file.
        dense: The model's layout.
        measured: What was measured, as `check_stats` returns it.
    """
    errors = [
        {name: curve.astype(np.float64) for name, curve in layer.items()}
        for layer in read_errors(path, dense, measured)
    ]
    tried = probes(dense, measured.methods)
    found = read_probes(path, dense, measured).astype(np.float64)
    scales = _scales(found, read_whole(path, measured))
    return measured_losses(tried, errors, found.mean(2) * scales.repeat(2))


def loss_by_sequence(
    path: Path, dense: ModelLayout, measured: Measured, layers: Sequence[LayerLayout], of: Losses
) -> NDArray[np.float64]:
    """The expected loss of a plan on each of the sequences that probes ran on, [sequences].

    Args:
        path: The statistics file.
        dense: The model's layout.
        measured: What was measured, as `check_stats` returns it.
        layers: The layers of the plan.
        of: The losses of all sequences together, as `read_losses` returns them.
    """
    weaker = read_probes(path, dense, measured)[:, 1::2].astype(np.float64)
    shares = weaker / np.maximum(weaker.mean(2, keepdims=True), _MIN_LOSS)
    parts = [probe.part for probe in probes(dense, measured.methods)[1::2]]
    found = np.zeros(shares.shape[2])
    for index, layer in enumerate(layers):
        for name, dim in _dims(dense, layer):
            found += of[index][name][dim] * shares[index, parts.index(part_of(name))]
    return found


def _dims(dense: ModelLayout, layer: LayerLayout) -> Iterator[tuple[str, int]]:
    """The names of the curves of what is smaller in `layer`, and its dims."""
    whole = dense.layers[0]
    if layer.key != whole.key:
        yield f"{layer.key.form}{dense.kv_heads_per(layer.key)}", layer.key.size
    if layer.value != whole.value:
        yield f"value{dense.kv_heads_per(layer.value)}", layer.value.size
    if layer.intermediate_size != whole.intermediate_size:
        yield "width", layer.intermediate_size
    for linear, rank in layer.ranks.items():
        yield f"rank.{linear}", rank


def _scales(probed: NDArray[np.float64], whole: NDArray[np.float32]) -> NDArray[np.float64]:
    """[parts] what a whole model of one smaller part loses, over the sum of its probes.

    Args:
        probed: [layers, probes, sequences].
        whole: [parts, sequences], of some of the sequences; there may be none.
    """
    if not whole.size:
        return np.ones(probed.shape[1] // 2)
    same = whole_sequences(probed.shape[2])
    expected = probed[:, 1::2, same].mean(2).sum(0)
    scales: NDArray[np.float64] = whole.mean(1) / np.maximum(expected, _MIN_LOSS)
    return np.clip(scales, 1 / _MAX_SCALE, _MAX_SCALE)


def measured_losses(
    tried: Sequence[Probe],
    errors: Sequence[Mapping[str, Curve]],
    measured: NDArray[np.float64],
) -> Losses:
    """Combine errors and probes into losses.

    Args:
        tried: The probes, which are the same in every layer.
        errors: The error curves of every layer, by name.
        measured: [layers, probes] what they lose, in nats per token.
    """
    losses = np.maximum(measured, _MIN_LOSS)
    return [_layer_curves(tried, layer, lost) for layer, lost in zip(errors, losses, strict=True)]


def _layer_curves(
    tried: Sequence[Probe], errors: Mapping[str, Curve], losses: NDArray[np.float64]
) -> dict[str, Curve]:
    """The curves of one layer by name. `losses` is [probes] of this layer."""
    curves: dict[str, Curve] = {}
    for number in range(0, len(tried), 2):
        part, strong, weak = tried[number].part, losses[number], losses[number + 1]
        left, right = (_probed(errors, p.part, p.layer) for p in tried[number : number + 2])
        own = {name: curve for name, curve in errors.items() if part_of(name) == part}
        if part.startswith("rank."):
            # The losses of linear layers are added, so they must be proportional to their errors.
            worth = np.sqrt(strong / left * weak / right)
            curves |= {name: worth * curve for name, curve in own.items()}
            continue
        with np.errstate(divide="ignore", invalid="ignore"):  # two probes may lose the same
            power = np.log(strong / weak) / np.log(left / right)
        power = np.clip(np.nan_to_num(power, nan=1.0), *_POWERS)
        curves |= {name: strong * (curve / left) ** power for name, curve in own.items()}
    return curves


def _probed(errors: Mapping[str, Curve], part: Part, layer: LayerLayout) -> float:
    """The error of `part` in a probe's layer."""
    match part:
        case "rotary" | "latent":
            error = errors[f"{part}1"][layer.key.size]
        case "value":
            error = errors["value1"][layer.value.size]
        case "width":
            error = errors["width"][layer.intermediate_size]
        case _:
            error = sum(errors[f"rank.{name}"][rank] for name, rank in layer.ranks.items())
    return max(float(error), _MIN_LOSS)
