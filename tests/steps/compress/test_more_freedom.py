"""A request that allows more methods or forms gives no worse a model, on text it has not seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.dense_models import config, write, write_text
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.texts.token_text import calibration_sequences

# By how much the losses of two plans may be in the wrong order. Two probes of each part, on 1024
# tokens of random weights, tell no more.
_TOLERANCE = 1.1


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("calibrated")
    model = write(directory / "model", config(hidden_size=64, intermediate_size=160))
    file = model / "model.safetensors"
    save_file({name: _decaying(name, w) for name, w in load_file(file).items()}, file)
    whole = write_text(directory / "whole.txt", 8000).read_text()
    text = directory / "text.txt"
    text.write_text(whole[:6500])
    (directory / "held_out.txt").write_text(whole[6500:])
    calibrate(
        model,
        [text],
        directory / "stats",
        CalibrateRequest(sequence_length=64),
        progress=False,
    )
    return model, directory / "stats"


def _decaying(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Attention's linears with singular values that fall off, so that low rank suits them."""
    if "self_attn" not in name:
        return weight
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    falling = torch.logspace(0, -4, len(s))
    return (u * falling * s.norm() / falling.norm()) @ vt


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"methods": ("heads", "prune")}, {"methods": ("heads", "prune", "lowrank")}),
        ({"key_form": "rotary", "key_group": 1, "value_group": 1}, {"key_form": "rotary"}),
        ({"key_form": "latent", "key_group": 1, "value_group": 1}, {"key_form": "latent"}),
    ],
    ids=["low rank beside the others", "merged rotary keys", "merged latent keys"],
)
def test_more_freedom_does_not_raise_the_loss(
    less: dict[str, Any], more: dict[str, Any], calibrated: tuple[Path, Path], tmp_path: Path
) -> None:
    model, stats = calibrated
    dense = open_checkpoint(model)
    held_out = model.with_name("held_out.txt")
    tokens = calibration_sequences(model, [held_out], length=64, max_tokens=1024)
    expected, measured, plans = [], [], []
    for number, options in enumerate((less, more)):
        request = PlanRequest(param_ratio=0.85, kv_ratio=0.75, **options)
        plan = measured_plan(dense, stats, request)
        plans.append(plan)
        out = tmp_path / str(number)
        compress(model, out, plan=plan, stats=stats, progress=False)
        expected.append(plan.expected_loss or 0.0)
        measured.append(divergence(dense, open_checkpoint(out), tokens))
    assert expected[1] <= expected[0] + 2e-6  # rounded
    if "lowrank" in more.get("methods", ()):
        assert any(layer.ranks for layer in plans[1].layers)
    assert measured[1] <= _TOLERANCE * measured[0], (expected, measured)


def divergence(dense: Checkpoint, small: Checkpoint, tokens: torch.Tensor) -> float:
    """The Kullback-Leibler divergence on `tokens`, in nats per token."""
    divergences = []
    for model in (dense, small):
        with model.reader() as read, torch.inference_mode():
            divergences.append(logits(reference(model), read, tokens).log_softmax(-1))
    before, after = divergences
    return float((before.exp() * (before - after)).sum(-1).mean())
