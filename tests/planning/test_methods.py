"""Each method has what it owes; one that the package does not have needs two files."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.compression.methods.one_layer import HEAD_DIM, HEADS, one_layer
from tests.compression.methods.query_heads import QueryHeads
from tests.support.dense_models import config, write, write_text
from tests.support.measured_layers import made_up_losses
from tests.support.stored_models import logits_of
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.measured import making, needed_by, probes, to_measure
from vllm_gac.compression.methods.registry import METHODS, Entry, component_of, methods_of
from vllm_gac.layout.dims import LayerLayout, layout_of
from vllm_gac.layout.key_forms import KEY_FORMS
from vllm_gac.planning.knapsack_items import part_candidates
from vllm_gac.planning.losses import measured_losses, prior_losses
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import plan, prior_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

DENSE = layout_of(config())
# RoPE is as the family has it.
FIELDS = [field.name for field in fields(LayerLayout) if field.name != "has_rope"]
EVERY = pytest.mark.parametrize("method", [*METHODS, "queries"])


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method more in the registry: all of it is in tests/compression/methods/query_heads.py."""
    monkeypatch.setitem(METHODS, "queries", Entry(QueryHeads, "fewer query heads"))


@EVERY
def test_every_method_has_compressors_probes_and_losses(method: str) -> None:
    (owner,) = methods_of([method])
    names = [c.name for c in to_measure(DENSE, [method], 2)]
    assert {component_of(name) for name in names} == {*owner.components}
    covariances, _ = needed_by(to_measure(DENSE, [method], 2))
    assert covariances
    tried = probes(DENSE, [method])
    assert [probe.component for probe in tried] == [*owner.components]
    assert all(probe.layer != DENSE.layers[0] for probe in tried)
    curves = made_up_losses(DENSE)[0] | {"queries": np.linspace(1, 0, 5)}
    errors = [{name: curve for name, curve in curves.items() if name in names}]
    lost = np.array([[0.1] * len(owner.components)])
    measured = measured_losses(DENSE, tried, errors, lost)[0]
    assert measured.keys() == {*names}
    assert all(0.1 <= curve[0] < 100 for name, curve in measured.items() if "rank" not in name)
    prior = prior_losses(DENSE, [method])[0]
    assert prior.keys() == {*names}


@EVERY
def test_all_that_a_method_makes_is_a_candidate_with_its_loss(method: str) -> None:
    (owner,) = methods_of([method])
    whole, curves = DENSE.layers[0], made_up_losses(DENSE)[0] | {"queries": np.linspace(1, 0, 5)}
    # auto leaves out what is slow in so small a model.
    forms = KEY_FORMS if "key" in owner.fields else ("auto",)
    requests = [PlanRequest(methods=[method], key_form=form) for form in forms]
    parts = [part for request in requests for part in part_candidates(DENSE, request, None)]
    changed = set()
    for part in parts:
        for layer in part.layers:
            made = replace(DENSE, layers=(layer,) * len(DENSE.layers))
            assert layer == whole or needed_by(making(DENSE, made))[0]
            assert part.put(whole, layer) == layer
            owner.check(DENSE, layer, "")
            changed |= {x for x in FIELDS if getattr(layer, x) != getattr(whole, x)}
    assert changed == {*owner.fields}
    for name in (compressor.name for compressor in to_measure(DENSE, [method], 2)):
        worse = {**curves, name: curves[name] + 1}
        assert any((part.losses(worse) > part.losses(curves)).any() for part in parts), name


def test_one_method_changes_each_field_of_a_layer() -> None:
    changed = [name for method in methods_of(METHODS) for name in method.fields]
    assert sorted(changed) == sorted(FIELDS)


def test_errors_without_probes_are_not_dropped() -> None:
    tried = probes(DENSE, ["prune"])
    measured = np.full((1, len(tried)), 0.1)
    curve = np.linspace(1, 0, DENSE.layers[0].intermediate_size + 1)
    assert measured_losses(DENSE, tried, [{"width": curve}], measured)[0].keys() == {"width"}
    with pytest.raises(ValueError, match="depth"):
        measured_losses(DENSE, tried, [{"width": curve, "depth": curve}], measured)


def test_a_made_up_method_removes_heads_that_nothing_reads_without_a_trace() -> None:
    layer = one_layer(model_type="qwen2")  # which has biases
    layer.weights["self_attn.o_proj.weight"].view(-1, HEADS, HEAD_DIM)[:, ::2] = 0
    assert layer.error(replace(layer.dense, query_heads=HEADS // 2)) < 1e-15


@pytest.mark.parametrize(
    ("methods", "ratio"), [(("queries",), 0.9), (("heads", "prune", "queries"), 0.6)]
)
def test_a_made_up_method_goes_from_calibration_to_weights(
    methods: tuple[str, ...], ratio: float, tmp_path: Path
) -> None:
    model, text = write(tmp_path / "model", config()), write_text(tmp_path / "text.txt")
    stats, out = tmp_path / "stats", tmp_path / "out"
    run = CalibrateRequest(methods=methods, max_tokens=1024, sequence_length=128)
    calibrate(model, [text], stats, run, progress=False)
    request = PlanRequest(param_ratio=ratio, methods=methods)
    made = plan(model, request, stats)
    assert made.expected_loss
    compress(model, out, made, CompressRequest(), stats=stats, progress=False)
    small = open_checkpoint(out)
    assert small.layout.layers == planned_layout(open_checkpoint(model), made).layers
    assert min(layer.query_heads for layer in small.layout.layers) == 2
    assert logits_of(small, torch.arange(128)[None]).isfinite().all()
    prior = prior_plan(open_checkpoint(model), request)
    assert prior.methods == [*methods]
