"""The costs and gains of a repair."""

from dataclasses import replace
from typing import Any

import pytest

from tests.alignment.test_padded_layout import dense
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.layout.dims import KeyLayout, ModelLayout
from vllm_gac.steps.repair.report import repair_report
from vllm_gac.steps.repair.request import RepairRequest


def test_every_change_is_counted_with_its_memory() -> None:
    model = dense(128)
    layer = replace(model.layers[0], key=KeyLayout("latent", 2, 107), intermediate_size=61)
    model = replace(model, layers=(layer, layer))
    report = repair_report(model, padded_layout(model, "minimal"))
    assert [(c.role, c.before, c.after, c.count) for c in report.changes] == [
        ("head", 107, 112, 2),
        ("width", 61, 64, 2),
    ]
    assert report.changes[0].overhead_percent == pytest.approx(4.67, abs=0.01)
    assert report.microseconds is None


def test_misaligned_dims_take_longer_than_what_they_are_padded_to() -> None:
    model = dense(128, width=12185)
    report = repair_report(model, padded_layout(model, "minimal"), RepairRequest(gpu="h200"))
    assert report.microseconds is not None
    assert report.microseconds.after < report.microseconds.before


def test_times_are_of_one_gpu_of_those_that_share_a_layer() -> None:
    model = dense(128, width=12185)
    assert microseconds(model, tensor_parallel_size=2) < microseconds(model)


def test_times_are_of_the_quantized_model_or_unknown() -> None:
    model = dense(128, width=12185)
    assert microseconds(model, quantization="fp8_per_tensor") < microseconds(model)
    request = RepairRequest(gpu="h200", quantization="mxfp8")
    assert repair_report(model, model, request).microseconds is None


def microseconds(model: ModelLayout, **request: Any) -> float:
    """The predicted time of a model."""
    time = repair_report(model, model, RepairRequest(gpu="h200", **request)).microseconds
    assert time is not None
    return time.before
