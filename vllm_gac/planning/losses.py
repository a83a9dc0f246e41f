"""The expected loss of every dim of every layer, in nats per token.

A method has an error at every dim (compression/methods/base.py). A probe tells the loss at one of
these errors (compression/probes.py), and all losses of the part are in proportion to their errors.
Errors are convex, so losses are convex too, and no plan removes everything from one layer.
(Powers that follow from two probes are mostly below 1, because errors are those of the text that
was fitted to; and a curve through a stronger probe expects too little of the dims that plans have.)

Whole models, in which every layer has the same probe, lose other than the sum of their probes. That
factor scales the losses of the part.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_gac.compression.measured import Measured
from vllm_gac.compression.probes import COMPONENTS, Component, Probe, probes, whole_sequences
from vllm_gac.compression.statistics_file import read_errors, read_probes, read_whole
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# [full + 1]: the loss at a dim of 0, 1, ..., full. The last one is 0.
Curve: TypeAlias = NDArray[np.float64]
# Of each layer, curves by the name of the method that has them (`component_of`): rotary1, latent2
# or value1 by the size of a head made of so many, width by the MLP's width, rank.mlp.up_proj by the
# rank of a linear.
Losses: TypeAlias = Sequence[Mapping[str, Curve]]

_MIN_LOSS = 1e-12
# A whole model loses at most so many times what its probes do, or so much less.
_MAX_SCALE = 10.0
# The mean squared relative error of e4m3, which has 3 bits after the leading one, for numbers whose
# logarithms are spread evenly: 1/768 is the variance of a step of 1/8, and the mean of 1/m^2 for m
# from 1 to 2 is 3 / (8 ln 2).
_E4M3_ERROR = 3 / (8 * math.log(2)) / 768
# Rounding that costs less than this in a layer, in nats per token, does not decide its form.
_MIN_ROUNDING = 1e-4


def component_of(name: str) -> Component:
    """The part of a layer that a method compresses.

    Args:
        name: The method's name (`Compressor.name`), which is also that of its curves of errors and
            of losses: the part, and then how many heads become one, or the linear.

    Returns:
        The part, which has probes.

    Raises:
        ValueError: There are no probes for the method, so that nothing says what its errors cost.
    """
    for component in COMPONENTS:
        if name.startswith(component):
            return component
    raise ValueError(f"{name}: begins with no component that has probes: {', '.join(COMPONENTS)}")


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
    return measured_losses(tried, errors, found.mean(2) * scales)


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
    probed = read_probes(path, dense, measured).astype(np.float64)
    shares = probed / np.maximum(probed.mean(2, keepdims=True), _MIN_LOSS)
    components = [probe.component for probe in probes(dense, measured.methods)]
    found = np.zeros(shares.shape[2])
    for index, layer in enumerate(layers):
        for name, dim in _dims(dense, layer, of[index]):
            found += of[index][name][dim] * shares[index, components.index(component_of(name))]
    return found


def with_fp8_keys(losses: Losses) -> Losses:
    """The losses where keys are cached in FP8: each curve of keys has what rounding costs on top.

    A rounded key has an error in proportion to its size, and the loss of a size of 0 is what keys
    as large as they are would cost. Biases make some keys hundreds of times as large as what tells
    tokens apart (Qwen2). A latent holds what is common to all keys in one element of nearly 1 for
    every token, which is rounded to exactly 1, so that only the other elements count.

    Args:
        losses: Of every layer, without a loss of the cache.
    """
    return [
        {name: curve + _of_rounding(name, curve) for name, curve in layer.items()}
        for layer in losses
    ]


def _of_rounding(name: str, curve: Curve) -> Curve:
    match component_of(name):
        case "rotary":
            cost = _E4M3_ERROR * (curve[0] - curve)
        case "latent":
            cost = _E4M3_ERROR * np.maximum(curve[1] - curve, 0.0)
        case _:
            cost = np.zeros_like(curve)
    return np.where(cost < _MIN_ROUNDING, 0.0, cost)


def loss_of(dense: ModelLayout, layers: Sequence[LayerLayout], losses: Losses) -> float:
    """The expected loss of a plan's `layers`, in nats per token."""
    return math.fsum(
        float(of[name][dim])
        for of, layer in zip(losses, layers, strict=True)
        for name, dim in _dims(dense, layer, of)
    )


def _dims(
    dense: ModelLayout, layer: LayerLayout, curves: Mapping[str, Curve]
) -> Iterator[tuple[str, int]]:
    """The dims of `layer`, each with the name of its curve, of those that have curves."""
    dims = {
        f"{layer.key.form}{dense.kv_heads_per(layer.key)}": layer.key.size,
        f"value{dense.kv_heads_per(layer.value)}": layer.value.size,
        "width": layer.intermediate_size,
        **{f"rank.{linear}": rank for linear, rank in layer.ranks.items()},
    }
    yield from ((name, dim) for name, dim in dims.items() if name in curves)


def _scales(probed: NDArray[np.float64], whole: NDArray[np.float32]) -> NDArray[np.float64]:
    """[probes] what the whole model of a probe loses, over the sum of the probes of its layers.

    Args:
        probed: [layers, probes, sequences].
        whole: [probes, sequences], of some of the sequences; there may be none.
    """
    if not whole.size:
        return np.ones(probed.shape[1])
    expected = probed[:, :, whole_sequences(probed.shape[2])].mean(2).sum(0)
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
    losses = []
    for of, lost in zip(errors, np.maximum(measured, _MIN_LOSS), strict=True):
        worth = {
            probe.component: x / _probed(of, probe) for probe, x in zip(tried, lost, strict=True)
        }
        losses.append({name: worth[component_of(name)] * curve for name, curve in of.items()})
    return losses


def _probed(errors: Mapping[str, Curve], probe: Probe) -> float:
    """The error of a probe's part in its layer."""
    layer = probe.layer
    match probe.component:
        case "rotary" | "latent" as component:
            error = errors[f"{component}1"][layer.key.size]
        case "value":
            error = errors["value1"][layer.value.size]
        case "width":
            error = errors["width"][layer.intermediate_size]
        case _:
            error = sum(errors[f"rank.{name}"][rank] for name, rank in layer.ranks.items())
    return max(float(error), _MIN_LOSS)
