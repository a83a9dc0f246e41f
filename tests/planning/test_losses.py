"""Losses: the measurements of the probes, and the curves through them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.dense_models import config, write, write_text
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.measured import HELD, StatsSpec, probes, shrink_covariances, to_measure
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.compression.statistics_file import Statistics, open_statistics
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import layout_of
from vllm_gac.planning import planner
from vllm_gac.planning.expected_loss import interval
from vllm_gac.planning.losses import (
    Losses,
    loss_by_sequence,
    loss_of,
    measured_losses,
    prior_losses,
    read_losses,
)
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate, write_statistics
from vllm_gac.steps.calibrate.request import CalibrateRequest

METHODS = ("heads", "prune", "lowrank")
RUN = CalibrateRequest(max_tokens=1024, sequence_length=128)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    directory = tmp_path_factory.mktemp("calibrated")
    model = write(directory / "model", config(), torch.bfloat16)
    text = write_text(directory / "text.txt")
    calibrate(model, [text], directory / "stats", RUN, progress=False)
    return model, text, directory / "stats"


@pytest.fixture
def statistics(calibrated: tuple[Path, Path, Path]) -> Statistics:
    directory, _, stats = calibrated
    return open_statistics(stats, open_checkpoint(directory))


def test_a_probe_is_about_how_far_the_model_so_compressed_diverges(statistics: Statistics) -> None:
    checkpoint = statistics.model
    dense, model = checkpoint.layout, reference(checkpoint)
    tokens, measured = statistics.tokens(HELD), statistics.probes().mean(2)
    with checkpoint.reader() as read, torch.inference_mode():
        whole = {name: read(name).float() for name in dense.tensors()}
        before = torch.log_softmax(logits(model, whole.__getitem__, tokens)[:, :-1], -1)
        for index, number in ((1, 0), (1, 1), (0, 2), (1, 3), (0, 4), (1, 5)):
            probe = probes(dense, METHODS)[number]
            prefix = f"model.layers.{index}."
            own = {n.removeprefix(prefix): t for n, t in whole.items() if n.startswith(prefix)}
            steady = shrink_covariances(statistics.layer(index, "cpu"), 1024)
            layer = MeasuredLayer(dense, own, steady, model.inv_freq)
            small = compress_layer(layer, probe.layer)
            layers = [probe.layer if i == index else a for i, a in enumerate(dense.layers)]
            probed = replace(model, layout=replace(dense, layers=tuple(layers)))
            tensors = {n: t for n, t in whole.items() if not n.startswith(prefix)}
            tensors |= {prefix + name: tensor.float() for name, tensor in small.items()}
            after = torch.log_softmax(logits(probed, tensors.__getitem__, tokens)[:, :-1], -1)
            direct = float((before.exp() * (before - after)).sum(-1).mean())
            assert 0.5 < measured[index, number] / direct < 1.5


def test_curves_fall_to_zero_are_convex_and_meet_the_probes(statistics: Statistics) -> None:
    dense, losses = statistics.model.layout, read_losses(statistics)
    for layer in losses:
        assert set(layer) == {c.name for c in to_measure(dense, METHODS, 2)}
        for name, curve in layer.items():
            assert np.isfinite(curve).all()
            assert curve[-1] == pytest.approx(0, abs=1e-9)
            assert (np.diff(curve) <= 1e-9).all(), name
            # Rotary sizes are even, and channels are chosen greedily.
            if not name.startswith("rotary") and name != "width":
                assert (np.diff(curve, 2) >= -1e-7 * curve[0]).all(), name


def test_losses_of_a_plan_add_up_over_layers_and_sequences(statistics: Statistics) -> None:
    probed, losses = statistics.probes(), read_losses(statistics)
    tried = probes(statistics.model.layout, METHODS)
    for part, name in enumerate(("rotary1", "latent1", "value1", "width")):
        layer = tried[part].layer
        dim = (layer.key.size, layer.key.size, layer.value.size, layer.intermediate_size)[part]
        for index in range(2):
            expected = probed[index, part].mean()
            assert losses[index][name][dim] == pytest.approx(expected, rel=1e-4)
        each = loss_by_sequence(statistics, [layer] * 2, losses)
        total = losses[0][name][dim] + losses[1][name][dim]
        assert each.mean() == pytest.approx(total, rel=1e-4)
        assert each.min() < each.max()


@pytest.mark.parametrize("lost", [0.1, 0.0, -1e-9])
def test_a_curve_is_in_proportion_to_errors_and_meets_its_probe(lost: float) -> None:
    dense = layout_of(config(num_hidden_layers=1))
    full = dense.layers[0].intermediate_size
    errors = [{"width": (1 - np.arange(full + 1) / full) ** 2}]
    tried = probes(dense, ("prune",))
    curve = measured_losses(dense, tried, errors, np.array([[lost]]))[0]["width"]
    probed = tried[0].layer.intermediate_size
    assert curve[probed] == pytest.approx(max(lost, 0), abs=1e-11)
    np.testing.assert_allclose(
        curve * errors[0]["width"][probed], curve[probed] * errors[0]["width"]
    )
    assert (curve >= 0).all()


@pytest.mark.parametrize("left", [0.0, 2e-5])
@pytest.mark.parametrize("lost", [0.0, 1e-9])
def test_a_probe_that_removed_only_dead_channels_tells_no_loss(left: float, lost: float) -> None:
    """The layer loses what others do; without others, what other models do. Ridges leave errors."""
    dense = layout_of(config(num_hidden_layers=3))
    full = dense.layers[0].intermediate_size
    share = np.arange(full + 1) / full
    live, dead = (1 - share) ** 2, np.maximum(0.75 - share, 0) ** 2
    errors = [{"width": curve} for curve in (live, 1000 * dead + left * (1 - share), 3 * live)]
    tried = probes(dense, ("prune",))
    curves = measured_losses(dense, tried, errors, np.array([[0.04], [lost], [0.04]]))
    assert curves[1]["width"][0] == pytest.approx(curves[0]["width"][0])
    assert curves[2]["width"][0] == pytest.approx(curves[0]["width"][0])
    (alone,) = measured_losses(dense, tried, errors[1:2], np.array([[lost]]))
    one = layout_of(config(num_hidden_layers=1))
    assert alone["width"][0] == pytest.approx(prior_losses(one, ("prune",))[0]["width"][0])


def test_a_sequence_has_its_share_of_a_loss_that_no_probe_told(
    statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, dense = read_losses(statistics), statistics.model.layout
    nothing = 0 * statistics.probes()
    monkeypatch.setattr(Statistics, "probes", lambda _: nothing)
    layers = [probes(dense, METHODS)[0].layer] * 2
    expected = loss_of(dense, layers, losses)
    assert loss_by_sequence(statistics, layers, losses) == pytest.approx(expected)


def test_a_plan_needs_what_was_calibrated_for(
    calibrated: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    directory, text, stats = calibrated
    checkpoint, request = open_checkpoint(directory), PlanRequest(kv_ratio=0.5)
    made = measured_plan(open_statistics(stats, checkpoint), request)
    assert made.expected_loss is not None
    pruned = replace(RUN, methods=["prune"])
    calibrate(directory, [text], tmp_path / "some", pruned, progress=False)
    with pytest.raises(PlanError, match=r"prune.* heads.* --method"):
        measured_plan(open_statistics(tmp_path / "some", checkpoint), request)
    kept = replace(StatsSpec.to_plan(checkpoint.layout, METHODS), value_group=1)
    write_statistics(checkpoint, [text], tmp_path / "single", kept, 1024, 128, "cpu", False)
    plan = measured_plan(open_statistics(tmp_path / "single", checkpoint), request)
    assert {layer.value.heads for layer in plan.layers} == {2}
    for group in ("value_group", "key_group"):
        with pytest.raises(PlanError, match=r"single.*--value-group.*--key-group"):
            measured_plan(
                open_statistics(tmp_path / "single", checkpoint), replace(request, **{group: 2})
            )


def test_a_plan_that_leaves_keys_whole_says_what_rounding_them_loses(
    statistics: Statistics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rounded(losses: Losses) -> Losses:
        return [
            {name: curve + 0.1 * (name == "rotary1") for name, curve in layer.items()}
            for layer in losses
        ]

    monkeypatch.setattr(planner, "with_fp8_cache", rounded)
    asked = PlanRequest(param_ratio=0.8, kv_cache_dtype="fp8")
    with_heads = measured_plan(statistics, asked)
    assert with_heads.notes["fp8_keys_loss"] == 0
    assert not caplog.text
    made = measured_plan(statistics, replace(asked, methods=("prune",)))
    count = len(made.layers)
    assert made.notes["fp8_keys_loss"] == pytest.approx(0.1 * count, abs=1e-5)
    assert "heads" in caplog.text


def test_a_sequence_that_no_quadratic_form_describes_makes_no_layer_dear(
    statistics: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes all layers dearer, by a quarter at most."""
    expected, probed = read_losses(statistics), statistics.probes()
    probed[1, 0, probed[1, 0].argmax()] *= 10_000
    monkeypatch.setattr(Statistics, "probes", lambda _: probed)
    dearer = [
        float(one["rotary1"][0] / other["rotary1"][0])
        for one, other in zip(read_losses(statistics), expected, strict=True)
    ]
    assert 1 <= dearer[0] <= 1.25
    assert dearer[1] / dearer[0] < 5


def test_the_range_of_a_loss_is_wider_where_documents_differ() -> None:
    assert interval(np.ones(8)) is None
    alike, differing = interval(np.ones(16)), interval(np.linspace(0.5, 1.5, 16))
    assert alike is not None
    assert differing is not None
    assert alike == pytest.approx((0.5, 2.5))
    assert 0 < differing[0] < alike[0] < 1 < alike[1] < differing[1]
    assert interval(np.zeros(16)) == (0, 0)
