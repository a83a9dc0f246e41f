"""The method heads: merged and smaller key and value heads."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from vllm_gac.compression.methods.base import (
    MERGEABLE,
    Candidates,
    Choices,
    Compressor,
    Curve,
    Method,
    Probe,
)
from vllm_gac.compression.methods.heads.keys import Keys
from vllm_gac.compression.methods.heads.values import Values
from vllm_gac.compression.methods.prior import prior_curve
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.layout.key_forms import KEY_FORMS, is_latent

# By form, number of heads that become one, and share of the dense elements (methods/prior.py).
_PRIOR = {
    "rotary1": (2.0, 0.49, 0.27, 0.146, 0.069, 0.020, 0.002, 0.0),
    "rotary2": (2.0, 0.43, 0.22, 0.120, 0.052, 0.024, 0.004, 0.0),
    "latent1": (2.0, 0.070, 0.022, 0.0085, 0.0040, 0.0020, 0.0004, 0.0),
    "latent2": (2.0, 0.022, 0.0070, 0.0032, 0.0014, 0.0006, 0.0001, 0.0),
    "value1": (2.0, 0.21, 0.086, 0.036, 0.016, 0.0070, 0.0020, 0.0),
    "value2": (2.0, 0.065, 0.022, 0.0097, 0.0050, 0.0022, 0.0006, 0.0),
}
# Shares of the dense dim that probes have. Plans have dims like these.
_ROTARY, _LATENT, _VALUE = 0.75, 0.5, 0.625
# The mean squared relative error of e4m3, which has 3 bits after the leading one, for numbers whose
# logarithms are spread evenly: 1/768 is the variance of a step of 1/8, and the mean of 1/m^2 for m
# from 1 to 2 is 3 / (8 ln 2).
_E4M3_ERROR = 3 / (8 * math.log(2)) / 768
# Rounding that costs less than this in a layer, in nats per token, does not decide its form.
_MIN_ROUNDING = 1e-4


class Heads(Method):
    """Merged and smaller key and value heads."""

    fields = ("key", "value")
    components = (*KEY_FORMS, "value")
    keeps_mlp = True

    def measured(self, dense: ModelLayout, value_group: int) -> Iterator[Compressor]:
        """Values, and both forms of keys. Key heads that are normed are not merged."""
        for group in sorted({1, value_group}):
            yield Values(group)
            if group == 1 or not dense.qk_norm:
                yield from (Keys(form, group) for form in KEY_FORMS)

    def making(self, dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
        """Values first, then keys."""
        heads, dense_layer = dense.num_key_value_heads, dense.layers[0]
        for kind, fewer in (("value", target.value.heads), ("key", target.key.heads)):
            if heads % fewer:
                raise PlanError(f"{fewer} {kind} heads cannot be made of {heads}")
        if target.value != dense_layer.value:
            yield Values(dense.kv_heads_per(target.value))
        if target.key != dense_layer.key:
            yield Keys(target.key.form, dense.kv_heads_per(target.key))

    def curve_dims(self, dense: ModelLayout, layer: LayerLayout) -> Iterator[tuple[str, int]]:
        """rotary1, latent2 or value1 by the size of a head made of so many."""
        yield f"{layer.key.form}{dense.kv_heads_per(layer.key)}", layer.key.size
        yield f"value{dense.kv_heads_per(layer.value)}", layer.value.size

    def probes(self, dense: ModelLayout) -> Iterator[Probe]:
        """Of each form of the keys, and of the values. No heads are merged."""
        layer, heads, size = dense.layers[0], dense.num_key_value_heads, dense.head_dim
        rotary = KeyLayout("rotary", heads, max(2, int(size * _ROTARY) // 2 * 2), rope_table=True)
        latent = KeyLayout("latent", heads, max(1, int(size * _LATENT)))
        value = ValueLayout(heads, max(1, int(size * _VALUE)))
        yield Probe("rotary", replace(layer, key=rotary))
        yield Probe("latent", replace(layer, key=latent))
        yield Probe("value", replace(layer, value=value))

    def prior(self, dense: ModelLayout) -> dict[str, Curve]:
        """By the size of a head made of one or two."""
        size = dense.head_dim
        return {name: prior_curve(table, int(name[-1]) * size) for name, table in _PRIOR.items()}

    def candidates(self, parts: Sequence[Candidates], choices: Choices) -> list[Candidates]:
        """The attentions that our kernels can serve."""
        served = choices.served(attention_candidates(choices))
        if not served:
            _refuse(choices)
        return [*parts, Candidates("self_attn.", served, self.fields)]

    def check(self, dense: ModelLayout, layer: LayerLayout, where: str) -> None:
        """At most two heads become one, and normed keys none."""
        for kind, heads, size in (
            ("key", layer.key.heads, layer.key.size),
            ("value", layer.value.heads, layer.value.size),
        ):
            group = dense.num_key_value_heads / heads
            if group not in MERGEABLE or size > group * dense.head_dim:
                raise PlanError(
                    f"{where}.{kind}: {heads} heads of {size} cannot be made of "
                    f"{dense.num_key_value_heads} of {dense.head_dim}; at most 2 heads become one"
                )
        if dense.qk_norm and layer.key.heads != (dense_heads := dense.layers[0].key.heads):
            raise PlanError(
                f"{where}.key.heads: {layer.key.heads}, but the {dense_heads} key heads of the "
                "model are normed one by one, so that none can be merged"
            )

    def with_fp8_cache(self, name: str, curve: Curve) -> Curve:
        """Each curve of keys with what rounding costs on top.

        A rounded key has an error in proportion to its size, and the loss of a size of 0 is what
        keys as large as they are would cost. Biases make some keys hundreds of times as large as
        what tells tokens apart (Qwen2). A latent holds what is common to all keys in one element of
        nearly 1 for every token, which is rounded to exactly 1, so that only the other elements
        count.
        """
        form = next((form for form in KEY_FORMS if name.startswith(form)), None)
        if form is None:
            return curve
        larger = np.maximum(curve[1] - curve, 0.0) if is_latent(form) else curve[0] - curve
        cost = _E4M3_ERROR * larger
        rounded: Curve = curve + np.where(cost < _MIN_ROUNDING, 0.0, cost)
        return rounded

    def value_group(self, dense: ModelLayout) -> int:
        """Two, if the heads of the model can be paired."""
        return max(group for group in MERGEABLE if dense.num_key_value_heads % group == 0)


def attention_candidates(choices: Choices) -> Iterator[LayerLayout]:
    """Yield the dense layer with each attention that can be made.

    There are at least as many key heads as value heads, and the same number of key heads shares
    every value head. Key heads that are normed are not merged: that is not exact.
    """
    dense, value_group, key_group = choices.dense, choices.value_group, choices.key_group
    layer, heads, size = dense.layers[0], dense.num_key_value_heads, dense.head_dim
    for merged in MERGEABLE if value_group is None else [value_group]:
        left = heads // merged
        if merged > 1 and left % choices.tensor_parallel_size:
            continue
        for together in MERGEABLE if key_group is None else [key_group]:
            if dense.qk_norm and together > 1:
                continue
            if heads % merged == 0 and merged % together == 0:
                for key in _keys(choices, together):
                    for smaller in choices.up_to(merged * size, "head", left):
                        yield replace(layer, key=key, value=ValueLayout(left, smaller))


def _keys(choices: Choices, group: int) -> Iterator[KeyLayout]:
    dense = choices.dense
    heads, full = dense.num_key_value_heads // group, dense.head_dim * group
    forms = [form for form in KEY_FORMS if choices.key_form in ("auto", form)]
    for size, form in product(choices.up_to(full, "head", heads), forms):
        if is_latent(form):
            yield KeyLayout(form, heads, size)
        elif size % 2 == 0:
            yield KeyLayout(form, heads, size, rope_table=size < full or group > 1)


def _refuse(choices: Choices) -> None:
    """Raise PlanError: there is no candidate."""
    dense = choices.dense
    if dense.qk_norm and (choices.key_group or 1) > 1:
        raise PlanError(
            f"--key-group {choices.key_group}: the key heads of this model are normed one by "
            "one, so that none can be merged; leave it out"
        )
    raise PlanError(
        f"--key-form {choices.key_form}, --key-group {choices.key_group or 'any'}, "
        f"--value-group {choices.value_group or 'any'}: no aligned size below "
        f"{dense.head_dim} for {dense.num_key_value_heads} KV heads that attention kernels "
        "take; groups must divide them, and a value head must be shared by whole key heads"
    )
