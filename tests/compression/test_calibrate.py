"""Calibration: the measurements, their form in the file, and the resumption of a stopped run."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.dense_models import config, write, write_text
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.cli import main
from vllm_gac.compression import passes
from vllm_gac.compression.effort import Work
from vllm_gac.compression.measured import STATISTICS
from vllm_gac.compression.methods.statistics import metric_of
from vllm_gac.compression.passes import observe_layer
from vllm_gac.compression.reference_model import embed, layer_forward, layer_weights, reference
from vllm_gac.compression.statistics_file import StatsFile, open_statistics
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LINEARS
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.texts.token_text import pack_documents, read_documents
from vllm_gac.texts.tokenizer import ModelTokenizer

RUN = CalibrateRequest(max_tokens=1024, sequence_length=128)
# Without heads, no neighbouring value heads are to be merged.
ALONE = ("prune", "lowrank")


def test_covariances_are_those_of_the_linears_inputs(
    model: Path, text: Path, tmp_path: Path
) -> None:
    calibrate(model, [text], tmp_path / "stats", replace(RUN, methods=ALONE), progress=False)
    checkpoint = open_checkpoint(model)
    statistics = open_statistics(tmp_path / "stats", checkpoint)
    assert statistics.measured.tokens == 1024
    fp64 = reference(checkpoint, torch.float64)
    tokens = load_file(tmp_path / "stats")["tokens"]
    assert tokens.shape == (8, 128)
    with checkpoint.reader() as read:
        hidden = embed(fp64, read, tokens)
        for index in range(2):
            inputs: dict[str, torch.Tensor] = {}
            layer = checkpoint.layout.layers[index]
            weights = layer_weights(fp64, read, index)
            hidden = layer_forward(fp64, layer, weights, hidden, inputs.__setitem__)
            stats = statistics.layer(index, "cpu")
            for name in STATISTICS:
                rows = inputs[name].flatten(0, 1)
                expected = rows.T @ rows / len(rows)
                torch.testing.assert_close(stats[name], expected, rtol=1e-4, atol=1e-5)


def test_covariances_of_merged_value_heads(model: Path, text: Path) -> None:
    checkpoint = open_checkpoint(model)
    fp64 = reference(checkpoint, torch.float64)
    tokenizer = ModelTokenizer(model)
    documents = read_documents(tokenizer, [text])
    tokens = pack_documents(tokenizer, documents, length=128, max_tokens=512)
    with checkpoint.reader() as read, torch.inference_mode():
        weights = layer_weights(fp64, read, 0)
        hidden = embed(fp64, read, tokens)
        single, after = observe_layer(fp64, 0, weights, hidden, value_group=1)
        double, after_too = observe_layer(fp64, 0, weights, hidden, value_group=2)
    torch.testing.assert_close(after, after_too)
    # Query heads now read both value heads. 0 and 1 use the first one, 2 and 3 the second one.
    own = [128 // 4 * head + 16 * (head // 2) + i for head in range(4) for i in range(16)]
    name = "self_attn.o_proj"
    assert double[name].shape == (128, 128)
    torch.testing.assert_close(double[name][own][:, own], single[name])


def test_a_resumed_run_ends_in_the_same_bytes(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(model, [text], tmp_path / "undisturbed", RUN, progress=False)
    append, appended = StatsFile.append, []

    def torn_in_layer_1(self: StatsFile, index: int, stats: Any) -> None:
        appended.append(index)
        if appended == [0, 1]:
            append(self, index, dict(list(stats.items())[:2]))
            raise KeyboardInterrupt
        append(self, index, stats)

    monkeypatch.setattr(passes, "_KEEP_SECONDS", 0)
    monkeypatch.setattr(StatsFile, "append", torn_in_layer_1)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, [text], tmp_path / "stats", RUN, progress=False)
    assert not (tmp_path / "stats").exists()
    calibrate(model, [text], tmp_path / "stats", RUN, progress=False)
    assert appended == [0, 1, 1]
    assert (tmp_path / "stats").read_bytes() == (tmp_path / "undisturbed").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


# How many files beside the statistics a run still writes after a stop by the n-th of them: two of
# metrics and two of gradients, and if states are kept after each layer, one of these of each of the
# two passes and two of hidden states.
@pytest.mark.parametrize(
    ("seconds", "left"), [(0, [8, 8, 6, 5, 5, 3, 2, 1, 0]), (999, [4, 4, 2, 2, 0])], ids=str
)
def test_a_pass_that_was_stopped_goes_on(
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
    left: list[int],
) -> None:
    written, last = 0, 0

    def stopping(write: Callable[..., None]) -> Callable[..., None]:
        def stop(*arguments: Any) -> None:
            nonlocal written
            write(*arguments)
            written += 1
            if written == last:
                raise KeyboardInterrupt

        return stop

    monkeypatch.setattr(passes, "_KEEP_SECONDS", seconds)
    for name in ("write_tensors", "write_floats"):
        monkeypatch.setattr(passes, name, stopping(getattr(passes, name)))
    for number, expected in enumerate(left):
        out = tmp_path / str(number)
        written, last = 0, number
        with pytest.raises(KeyboardInterrupt) if number else nullcontext():
            calibrate(model, [text], out, RUN, progress=False)
        calibrate(model, [text], out, RUN, progress=False)
        assert written - number == expected
        assert out.read_bytes() == (tmp_path / "0").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_hidden_states_on_the_device_give_the_same_statistics(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(model, [text], tmp_path / "usual", RUN, progress=False)
    # PyTorch's other name of the CPU stands for a GPU with room.
    monkeypatch.setattr(Work, "home", lambda work, device, free: "cpu:0")
    calibrate(model, [text], tmp_path / "stays", RUN, progress=False)
    assert (tmp_path / "stays").read_bytes() == (tmp_path / "usual").read_bytes()


@pytest.mark.parametrize("really", [0.0, 1e6])
def test_a_probe_loses_at_least_what_is_really_lost(
    really: float, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the MLP in the first quarter of the layers; nothing else changes."""
    checkpoint, read = open_checkpoint(model), []
    monkeypatch.setattr(passes, "measure_followed", lambda *arguments: really)
    calibrate(model, [text], tmp_path / "stats", replace(RUN, methods=ALONE), progress=False)
    monkeypatch.setattr(passes, "followed", lambda *arguments: [])
    calibrate(model, [text], tmp_path / "form", replace(RUN, methods=ALONE), progress=False)
    for name in ("stats", "form"):
        read.append(open_statistics(tmp_path / name, checkpoint).probes())
    lost, form = read
    if not really:
        assert (lost == form).all()
        return
    assert lost[0, [0, 2]].mean(1) == pytest.approx(really, rel=1e-4)
    changed = (lost != form).any(2)
    assert changed.tolist() == [[True, False, True], [False] * 3]


def test_work_of_another_calibration_is_not_continued(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = StatsFile.append

    def stop(self: StatsFile, index: int, stats: Any) -> None:
        append(self, index, stats)
        raise KeyboardInterrupt

    monkeypatch.setattr(StatsFile, "append", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, [text], tmp_path / "stats", replace(RUN, max_tokens=256), progress=False)
    monkeypatch.undo()
    calibrate(model, [text], tmp_path / "stats", RUN, progress=False)
    calibrate(model, [text], tmp_path / "fresh", RUN, progress=False)
    assert (tmp_path / "stats").read_bytes() == (tmp_path / "fresh").read_bytes()


KEPT = {
    "heads": ["self_attn.q_proj", "self_attn.o_proj"],
    "prune": ["mlp.down_proj"],
    "heads,prune": ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"],
    "lowrank": list(STATISTICS),
}


@pytest.mark.parametrize("methods", KEPT)
def test_only_needed_covariances_and_metrics_are_stored(
    methods: str, model: Path, text: Path, tmp_path: Path
) -> None:
    request = replace(RUN, methods=methods.split(","))
    calibrate(model, [text], tmp_path / "stats", request, progress=False)
    sizes = {"self_attn.q_proj": 48, "self_attn.o_proj": 64, "mlp.gate_proj": 48}
    sizes |= {"mlp.down_proj": 96, **({"self_attn.o_proj": 128} if "heads" in methods else {})}
    with safe_open(tmp_path / "stats", framework="pt") as file:
        for name in STATISTICS:
            key, size = f"layers.1.{name}", sizes[name]
            assert (key in file.keys()) == (name in KEPT[methods])  # noqa: SIM118
            if key in file.keys():  # noqa: SIM118
                assert file.get_slice(key).get_shape() == [size * (size + 1) // 2]
    stats = open_statistics(tmp_path / "stats", open_checkpoint(model)).layer(1, "cpu")
    for matrix in stats.values():
        assert torch.equal(matrix, matrix.T)
        assert float(torch.linalg.eigvalsh(matrix)[0]) > -1e-6
    metrics = dict(zip(map(metric_of, LINEARS), (64, 32, 32, 48, 48, 48, 48), strict=True))
    sizes = {name: len(matrix) for name, matrix in stats.items() if name in metrics}
    assert sizes == (metrics if methods == "lowrank" else {})
    assert all(float(torch.linalg.eigvalsh(stats[name])[0]) > 0 for name in sizes)


def test_sequences_of_one_token_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    request = CalibrateRequest(sequence_length=1)
    with pytest.raises(CheckpointError, match="sequences of 1 token"):
        calibrate(model, [text], tmp_path / "stats", request, progress=False)


def test_too_little_text_is_logged(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "short.txt", 700)
    args = ["calibrate", model, "--text", text, "--sequence-length", 64, "--method", "heads"]
    assert main([*map(str, args), "--quiet", "--out", str(tmp_path / "few")]) == 0
    few, set_aside = capsys.readouterr().err.splitlines()[::-1]
    for said in ("576 tokens", "6.0 for each", "96 channels", "1,536 tokens", "--max-tokens"):
        assert said in few
    assert "only 64 tokens" in set_aside
    write_text(text, 1800)
    assert main([*map(str, args), "--quiet", "--out", str(tmp_path / "enough")]) == 0
    assert "channels" not in capsys.readouterr().err


def test_wide_models_are_calibrated_on_more_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def split(*args: Any, fit_tokens: int, **options: Any) -> torch.Tensor:
        asked.append(fit_tokens)
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_gac.steps.calibrate.calibrate.split_sequences", split)
    text = write_text(tmp_path / "text")
    for width in (96, 5000):
        wide = write(tmp_path / f"{width}", config(intermediate_size=width, num_hidden_layers=1))
        for options in ({}, {"max_tokens": 99}):
            with pytest.raises(KeyboardInterrupt):
                calibrate(wide, [text], tmp_path / "stats", CalibrateRequest(**options))
    assert asked == [65_536, 99, 80_000, 99]
