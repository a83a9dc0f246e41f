"""Each method has what it owes: fields, statistics, probes, curves of losses, and candidates."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.support.dense_models import config
from tests.support.measured_layers import made_up_losses
from vllm_gac.compression.measured import covariances_for, covariances_of
from vllm_gac.compression.methods.compress_layer import measurable_methods
from vllm_gac.compression.probes import METHOD_COMPONENTS, probes
from vllm_gac.layout.dims import LayerLayout, layout_of
from vllm_gac.layout.schema import CHANGED_BY, METHODS, Method
from vllm_gac.planning.knapsack_items import part_candidates
from vllm_gac.planning.losses import component_of, measured_losses
from vllm_gac.planning.prior_losses import prior_losses
from vllm_gac.planning.request import PlanRequest

DENSE = layout_of(config())
FIELDS = [field.name for field in fields(LayerLayout)]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_what_it_owes(method: Method) -> None:
    components = METHOD_COMPONENTS[method]
    names = [c.name for c in measurable_methods(DENSE, [method], 2)]
    assert {component_of(name) for name in names} == {*components}
    assert covariances_of([method])
    tried = probes(DENSE, [method])
    assert {probe.component for probe in tried} == {*components}
    assert all(probe.layer != DENSE.layers[0] for probe in tried)
    errors = [{name: curve for name, curve in made_up_losses(DENSE)[0].items() if name in names}]
    lost = np.array([[0.1] * len(components)])
    measured = measured_losses(tried, errors, lost)[0]
    assert measured.keys() == {*names}
    assert all(0.1 <= curve[0] < 100 for name, curve in measured.items() if "rank" not in name)
    assert {*names} <= prior_losses(DENSE)[0].keys()


@pytest.mark.parametrize("method", METHODS)
def test_all_that_a_method_makes_is_a_candidate_with_its_loss(method: Method) -> None:
    whole, curves = DENSE.layers[0], made_up_losses(DENSE)[0]
    forms = ("rotary", "latent")  # auto leaves out what is slow in so small a model
    requests = [PlanRequest(methods=[method], key_form=form) for form in forms]
    parts = [part for request in requests for part in part_candidates(DENSE, request, None)]
    changed = set()
    for part in parts:
        for layer in part.layers:
            made = replace(DENSE, layers=(layer,) * len(DENSE.layers))
            assert layer == whole or covariances_for(DENSE, made)
            assert part.put(whole, layer) == layer
            changed |= {x for x in FIELDS if getattr(layer, x) != getattr(whole, x)}
    assert changed == {*CHANGED_BY[method]}
    for name in (compressor.name for compressor in measurable_methods(DENSE, [method], 2)):
        worse = {**curves, name: curves[name] + 1}
        assert any((part.losses(worse) > part.losses(curves)).any() for part in parts), name


def test_one_method_changes_each_field_of_a_layer() -> None:
    changed = [name for method in METHODS for name in CHANGED_BY[method]]
    assert sorted([*changed, "query_heads"]) == sorted(FIELDS)


def test_errors_without_probes_are_not_dropped() -> None:
    tried = probes(DENSE, ["prune"])
    measured = np.full((1, len(tried)), 0.1)
    curve = np.linspace(1, 0, DENSE.layers[0].intermediate_size + 1)
    assert measured_losses(tried, [{"width": curve}], measured)[0].keys() == {"width"}
    with pytest.raises(
        ValueError, match="depth: begins with no component that has probes: rotary, "
    ):
        measured_losses(tried, [{"width": curve, "depth": curve}], measured)
