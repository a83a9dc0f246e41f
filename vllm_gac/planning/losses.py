"""The expected loss of every dim of every layer, in nats per token.

A method has an error at every dim (compression/methods/base.py). A probe tells the loss at one of
these errors (compression/probes.py), and all losses of the part are in proportion to their errors.
Errors are convex, so losses are convex too, and no plan removes everything from one layer.
(Powers that follow from two probes are mostly below 1, because errors are those of the text that
was fitted to; and a curve through a stronger probe expects too little of the dims that plans have.)

The losses of layers add up. Errors of different layers agree a little, so that whole models lose
more than the sum says; and refitting each layer to what the layers before really feed it
(compression/refit.py) wins some back, of attention more than of MLPs. Whole models of probes do not
tell more: what they lose is lost in layers that plans leave nearly whole.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_gac.compression.measured import probes
from vllm_gac.compression.methods.base import Curve, Probe
from vllm_gac.compression.methods.registry import METHODS, component_of, methods_of, owner_of
from vllm_gac.compression.statistics_file import Statistics
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# Of each layer, the methods' curves by their names (`Method.curve_dims`).
Losses: TypeAlias = Sequence[Mapping[str, Curve]]

_MIN_LOSS = 1e-12
# Of the error of the whole part. Below it a probe has removed nothing that was used, and tells
# nothing: ridges leave up to 2e-5 where all of it is dead (methods/prune.py).
_NEGLIGIBLE = 3e-5
# What a probe loses on a sequence counts up to so many times the median of the sequences, and what
# is above that in all of them adds at most a quarter.
_MAX_OVER_MEDIAN, _MAX_ADDED = 4.0, 1.25


def prior_losses(dense: ModelLayout, methods: Iterable[str]) -> Losses:
    """The losses of other models (methods/prior.py), for a dense model without statistics.

    Every layer has the same curves. The losses of all layers add up to that of the model.
    """
    count = len(dense.layers)
    prior = [method.prior(dense) for method in methods_of(methods)]
    return [{name: x / count for curves in prior for name, x in curves.items()}] * count


def read_losses(stats: Statistics) -> Losses:
    """Read the losses from the statistics of a model."""
    errors = [
        {name: curve.astype(np.float64) for name, curve in layer.items()}
        for layer in stats.errors()
    ]
    dense = stats.model.layout
    tried = probes(dense, stats.measured.methods)
    return measured_losses(dense, tried, errors, _read_probed(stats).mean(2))


def loss_by_sequence(
    stats: Statistics, layers: Sequence[LayerLayout], of: Losses
) -> NDArray[np.float64]:
    """The expected loss of a plan on each of the sequences that probes ran on, [sequences].

    Args:
        stats: The statistics of the model.
        layers: The layers of the plan.
        of: The losses of all sequences together, as `read_losses` returns them.
    """
    dense, probed = stats.model.layout, _read_probed(stats)
    mean = probed.mean(2, keepdims=True)
    shares = np.divide(probed, mean, out=np.ones_like(probed), where=mean > _MIN_LOSS)
    components = [probe.component for probe in probes(dense, stats.measured.methods)]
    by_sequence = np.zeros(shares.shape[2])
    for index, layer in enumerate(layers):
        for name, dim in _dims(dense, layer, of[index]):
            by_sequence += (
                of[index][name][dim] * shares[index, components.index(component_of(name))]
            )
    return by_sequence


def with_fp8_cache(losses: Losses) -> Losses:
    """The losses, without one of the cache, where keys and values are cached in FP8."""
    return [
        {name: owner_of(name).with_fp8_cache(name, curve) for name, curve in layer.items()}
        for layer in losses
    ]


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
    for method in methods_of(METHODS):
        for name, dim in method.curve_dims(dense, layer):
            if name in curves:
                yield name, dim


def _read_probed(stats: Statistics) -> NDArray[np.float64]:
    """[layers, probes, sequences] what each probe loses. Outliers count for all layers alike.

    The square of an error that is too large for a quadratic form says far too much of one layer: at
    a token of massive activations, often the first "." or "\\n\\n" of a sequence, it says up to
    hundreds of nats. Plans that count it in full give early layers too much. Without it the sum of
    all layers would be too small, and with all of it five times too large (docs/decisions.md).
    """
    probed = stats.probes().astype(np.float64)
    limited = probed.clip(max=_MAX_OVER_MEDIAN * np.median(probed, 2, keepdims=True))
    total: float = limited.sum()
    return limited * min(probed.sum() / total, _MAX_ADDED) if total > 0 else probed


def measured_losses(
    dense: ModelLayout,
    tried: Sequence[Probe],
    errors: Sequence[Mapping[str, Curve]],
    measured: NDArray[np.float64],
) -> Losses:
    """Combine errors and probes into losses.

    Where a probe has a negligible error, the whole part loses the median of what it loses in other
    layers, or what it loses in other models if there are none.

    Args:
        dense: The model's layout.
        tried: The probes, which are the same in every layer.
        errors: The error curves of every layer, by name.
        measured: [layers, probes] what they lose, in nats per token.
    """
    losses: list[dict[str, Curve]] = [{} for _ in errors]
    for probe, lost in zip(tried, np.maximum(measured, _MIN_LOSS).T, strict=True):
        dims = [
            (name, dim)
            for name, dim in _dims(dense, probe.layer, errors[0])
            if component_of(name) == probe.component
        ]
        error = np.array([sum(float(of[name][dim]) for name, dim in dims) for of in errors])
        whole = np.array([sum(float(of[name][0]) for name, _ in dims) for of in errors])
        if (tells := error > _NEGLIGIBLE * whole).any():
            usual = float(np.median((lost / np.where(tells, error, 1) * whole)[tells]))
        else:
            prior = owner_of(dims[0][0]).prior(dense)
            usual = sum(float(prior[name][0]) for name, _ in dims) / len(errors)
        worth = np.where(tells, lost, usual) / np.where(tells, error, np.maximum(whole, _MIN_LOSS))
        for of, by_name, x in zip(errors, losses, worth, strict=True):
            own = [name for name in of if component_of(name) == probe.component]
            by_name |= {name: x * of[name] for name in own}
    return losses
