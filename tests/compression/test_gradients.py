"""One backward pass: its scores agree with autograd on the whole model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import dense_models
from tests.support.command import error, result, usage
from tests.support.dense_models import config
from tests.support.exact_models import MODELS, exact_model, random_tokens
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.token_text import calibration_sequences
from vllm_gac.compression import calibrate as calibration
from vllm_gac.compression.calibrate import calibrate
from vllm_gac.compression.gradients import measure_gradients
from vllm_gac.compression.reference_model import (
    Reference,
    logits,
    reference,
)
from vllm_gac.compression.statistics_file import check_stats, read_errors, read_gradients
from vllm_gac.layout.dims import LINEARS
from vllm_gac.planning.losses import read_losses
from vllm_gac.planning.proportional import FisherScores, proportional_layers

INPUT_OF = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}


@dataclass(frozen=True)
class Measured:
    """A model in fp64, a text, and the scores from its gradients."""

    model: Reference
    tensors: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    found: Mapping[str, torch.Tensor]

    def losses(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The mean loss of each sequence."""
        found = []
        for sequence in self.tokens:
            predicted = logits(self.model, tensors.__getitem__, sequence[None])[0, :-1]
            found.append(torch.nn.functional.cross_entropy(predicted, sequence[1:]))
        return found


def measure(tokens: torch.Tensor | None = None, **changes: Any) -> Measured:
    """Measure a model, by default on 5 sequences of 40 random tokens."""
    model, tensors = exact_model(**changes)
    if tokens is None:
        tokens = random_tokens(5, 40)
    found = measure_gradients(model, tensors.__getitem__, tokens)
    return Measured(model, tensors, tokens, found)


TIED: dict[str, dict[str, Any]] = {"tied": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("changes", (MODELS | TIED).values(), ids=MODELS | TIED)
def test_scores_are_those_of_autograd_on_the_whole_model(changes: dict[str, Any]) -> None:
    measured = measure(**changes)
    tensors = {name: tensor.requires_grad_() for name, tensor in measured.tensors.items()}
    losses = measured.losses(tensors)
    for layer in range(2):
        names = [f"model.layers.{layer}.{linear}.weight" for linear in LINEARS]
        wanted = [tensors[name] for name in names]
        each = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
        gradients = {linear: torch.stack(g) for linear, *g in zip(LINEARS, *each, strict=True)}
        fisher = [gradients[linear].square().mean(0).sqrt().mean() for linear in LINEARS]
        close(measured.found["fisher"][layer], torch.stack(fisher))
        importance = {
            linear: (tensor * gradients[linear].mean(0)).abs()
            for linear, tensor in zip(LINEARS, wanted, strict=True)
        }
        taylor = importance["mlp.gate_proj"].sum(1) + importance["mlp.up_proj"].sum(1)
        close(measured.found["taylor"][layer], taylor + importance["mlp.down_proj"].sum(0))


def close(got: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-9) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(got, expected.detach(), rtol=rtol, atol=rtol * scale)


# ---- in the statistics -----------------------------------------------------------------------

RUN: dict[str, Any] = {"max_tokens": 1024, "sequence_length": 128, "progress": False}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_models.write(tmp_path / "dense", config())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return dense_models.write_text(tmp_path / "text.txt")


def test_what_is_measured_is_kept(dense: Path, text: Path, tmp_path: Path) -> None:
    calibrate(dense, [text], tmp_path / "stats", gradient_tokens=512, **RUN)
    model = reference(open_checkpoint(dense), torch.float64)
    tokens = calibration_sequences(dense, [text], length=128, max_tokens=1024)
    with open_checkpoint(dense).reader() as read:
        found = measure_gradients(model, read, tokens[::2])
    assert found["fisher"].shape == (2, 7)
    assert found["taylor"].shape == (2, 96)
    for name, expected in found.items():
        close(torch.from_numpy(read_gradients(tmp_path / "stats", name)).double(), expected, 2e-3)


@pytest.mark.slow
def test_a_run_stopped_in_the_backward_pass_goes_on(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> dict[str, torch.Tensor]:
        raise KeyboardInterrupt

    calibrate(dense, [text], tmp_path / "undisturbed", gradient_tokens=256, **RUN)
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "measure_gradients", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrate(dense, [text], tmp_path / "stats", gradient_tokens=256, **RUN)
    assert not (tmp_path / "stats").exists()
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "observe_layer", stop)  # no layer is run again
        calibrate(dense, [text], tmp_path / "stats", gradient_tokens=256, **RUN)
    assert (tmp_path / "stats").read_bytes() == (tmp_path / "undisturbed").read_bytes()


# ---- plans by gradients ----------------------------------------------------------------------

OPTIONS = ("--max-tokens", 512, "--sequence-length", 64)


@pytest.fixture
def stats(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Path]:
    def made(*options: object) -> Path:
        path = tmp_path / "stats.safetensors"
        result(capsys, "calibrate", dense, "--text", text, "--out", path, *OPTIONS, *options)
        return path

    return made


def test_ranks_are_planned_by_gradients_without_probes(
    dense: Path, stats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = stats("--method", "lowrank", "--probe-tokens", 0)
    asked = ("plan", dense, "--stats", file, "--param-ratio", 0.8, "--method", "lowrank")
    plan = result(capsys, *asked, "--sensitivity", "kfac")
    assert plan["parameters"]["used"] <= plan["parameters"]["allowed"]
    assert plan["notes"]["sensitivity"] == "kfac"
    model = open_checkpoint(dense)
    metadata = check_stats(file, model.layout, model.config_sha256)
    errors = read_errors(file, model.layout, metadata)
    expected = sum(
        errors[index][f"rank.{name}"][rank]
        for index, layer in enumerate(plan["layers"])
        for name, rank in layer["ranks"].items()
    )
    assert plan["expected_loss"] == pytest.approx(expected, abs=2e-6)
    assert any(layer["ranks"] for layer in plan["layers"])
    assert "calibrate with --probe-tokens" in error(capsys, *asked)


def test_beside_other_methods_only_ranks_are_judged_otherwise(
    dense: Path, stats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = stats()
    model = open_checkpoint(dense)
    metadata = check_stats(file, model.layout, model.config_sha256)
    probe, kfac = (read_losses(file, model.layout, metadata, kind) for kind in ("probe", "kfac"))
    for index in range(2):
        for name, curve in kfac.curves[index].items():
            ranks = name.startswith("rank.")
            assert np.array_equal(curve, probe.curves[index][name]) == (not ranks)
            assert len(curve) == len(probe.curves[index][name])
    asked = ("plan", dense, "--stats", file, "--kv-ratio", 0.75, "--param-ratio", 0.8)
    plan = result(capsys, *asked, "--method", "heads,prune,lowrank", "--sensitivity", "kfac")
    assert plan["expected_loss"] > 0
    said = error(capsys, *asked, "--sensitivity", "kfac")
    assert said == "--sensitivity kfac is of the ranks of linears; add lowrank to --method"


def test_fisher_shares_the_cache_out_in_proportion(dense: Path) -> None:
    layout = open_checkpoint(dense).layout
    fisher = np.full((2, 7), 0.1)
    fisher[:, [LINEARS.index(f"self_attn.{name}_proj") for name in "kv"]] = [[1, 2], [3, 4]]
    layers = proportional_layers(
        layout, FisherScores(fisher), ["heads"], "latent", layout.parameters, 50
    )
    sizes = [size for layer in layers for size in (layer.key.size, layer.value.size)]
    # Two heads, 25 of 64 numbers each: x, 2x, 3x, 4x.
    assert sizes == [2, 5, 8, 10]


def test_the_fisher_objective_gives_aligned_dims_within_budgets(
    dense: Path, stats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = stats("--gradients")
    for method, ratios in {
        "heads": ("--kv-ratio", 0.75),
        "lowrank": ("--param-ratio", 0.8),
        "heads,prune": ("--kv-ratio", 0.75, "--param-ratio", 0.85),
    }.items():
        asked = ("plan", dense, "--stats", file, "--method", method, *ratios)
        plan = result(capsys, *asked, "--objective", "fisher")
        for budget in (plan["parameters"], plan["kv_elements"]):
            assert budget["used"] <= budget["allowed"]
        sizes = [s["key"]["size"] for s in plan["layers"]]
        sizes += [r for s in plan["layers"] for r in s["ranks"].values()]
        assert all(size % 8 == 0 for size in sizes)
        assert plan["notes"]["objective"] == "fisher"


def test_channels_of_the_lowest_taylor_score_go(
    dense: Path, stats: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = stats("--gradients"), tmp_path / "out"
    asked = ("--stats", file, "--param-ratio", 0.85, "--method", "prune")
    made = ("compress", dense, "--out", out, *asked, "--prune-criterion", "taylor")
    result(capsys, *made)
    source = json.loads((out / "config.json").read_text())["gac"]["source"]
    assert source["prune_criterion"] == "taylor"
    small, whole = open_checkpoint(out), open_checkpoint(dense)
    scores = read_gradients(file, "taylor")
    with small.reader() as read, whole.reader() as read_dense:
        for index, layer in enumerate(small.layout.layers):
            assert layer.intermediate_size < 96
            best = np.sort(np.argsort(scores[index])[96 - layer.intermediate_size :])
            name = f"model.layers.{index}.mlp.up_proj.weight"
            assert torch.equal(read(name), read_dense(name)[best])


def test_compress_measures_the_gradients_it_needs(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = ("--param-ratio", 0.8, "--method", "lowrank", "--objective", "fisher")
    made = result(capsys, "compress", dense, "--out", out, *asked, "--calibration", text, *OPTIONS)
    assert made["parameters"] <= 0.8 * made["dense_parameters"]
    plan = json.loads((out / "plan.json").read_text())
    assert plan["notes"]["calibration"]["gradient_tokens"] == "512"


def test_statistics_without_gradients_are_explained(
    dense: Path, stats: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stats("--method", "prune,lowrank")
    asked = (dense, "--stats", file, "--param-ratio", 0.9, "--method", "prune,lowrank")
    for flag, value in {
        "--objective": "fisher",
        "--prune-criterion": "taylor",
    }.items():
        verb = ("compress", "--out", tmp_path / "out") if value != "fisher" else ("plan",)
        said = error(capsys, *verb, *asked, flag, value)
        assert said == (
            f"{file}: no gradients were measured, which {flag} {value} needs; "
            "calibrate with --gradients"
        )
    assert not list(tmp_path.glob("out*"))
    said = usage(capsys, "plan", dense, "--kv-ratio", 0.75, "--sensitivity", "kfac")
    assert "--sensitivity kfac needs --stats" in said
    said = usage(capsys, "calibrate", dense, "--text", "t", "--out", "o", "--gradients", "-1")
    assert "-1" in said


def test_nothing_can_be_predicted_in_sequences_of_one_token(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("calibrate", dense, "--text", text, "--out", tmp_path / "stats")
    said = error(capsys, *asked, "--sequence-length", 1, "--gradients")
    assert "sequences of 1 token" in said
