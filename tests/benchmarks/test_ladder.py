"""The ladder: text is split and licensed, training resumes in the same bytes, rows are measured."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.quality.ladder import measure as measuring
from benchmarks.quality.ladder import scores, training
from benchmarks.quality.ladder.__main__ import main
from benchmarks.quality.ladder.rows import ROWS, is_variant
from benchmarks.quality.ladder.scores import runner, window_losses
from benchmarks.quality.ladder.sizes import SIZES
from benchmarks.quality.ladder.tasks import copies, needles, score
from benchmarks.quality.ladder.text import WINDOW, chunks, is_permissive, read_tensor
from benchmarks.quality.ladder.training import Point, Run, train
from tools.demo_model.corpus import split_of
from tools.demo_model.llama import Llama
from vllm_gac import demo
from vllm_gac.errors import GacError
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress_request import CompressRequest
from vllm_gac.steps.evaluate import evaluate

# Lines of the first module, which is too long to calibrate with.
LONG = 900
WORDS = ["alpha", "beta", "gamma", "index", "value", "result", "count", "buffer", "parse", "read"]
RUN = Run(
    size="tiny",
    rope_theta=10000.0,
    tokens=6 * 4 * 128,
    minutes=60,
    length=128,
    seed=0,
    text_sha256="of the text",
)


def module(number: int) -> str:
    rng = random.Random(number)
    return "".join(
        f"def {rng.choice(WORDS)}_{number}_{line}({rng.choice(WORDS)}): return {rng.random():.3f}\n"
        for line in range(110 if number else LONG)
    )


def names() -> Iterator[tuple[int, str]]:
    for number in range(300):
        path = f"package_{number % 7}/module_{number}.py"
        if number < 110 or split_of(path) == "heldout":
            yield number, path


def calibration_of(text: Path) -> str:
    return "".join((text / f"calibration-{n}.txt").read_text() for n in range(3))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ladder")
    for number, path in names():
        file = directory / "library" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(module(number))
    out = directory / "text"
    assert main(["text", str(out), "--library", str(directory / "library"), "--packages"]) == 0
    return out


@pytest.fixture(scope="module")
def trained(text: Path) -> Path:
    """A run of two evaluations."""
    out = text.parent / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_EVALUATE_EVERY", 3)
        train(out, text, RUN, "cpu")
    return out


def test_held_out_windows_are_of_held_out_documents_alone(text: Path) -> None:
    manifest = json.loads((text / "manifest.json").read_text())
    assert {split_of(path) for path in manifest["held_out_documents"]} == {"heldout"}
    windows = read_tensor(text, "heldout.safetensors", "windows")
    document = read_tensor(text, "heldout.safetensors", "document")
    assert windows.shape == (manifest["held_out_windows"], WINDOW)
    assert int(document.max()) + 1 == len(manifest["held_out_documents"])
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    held_out = (text / "heldout.txt").read_text()
    assert all(tokenizer.decode(window.tolist()) in held_out for window in windows)
    training_text = calibration_of(text)
    assert not any(path in training_text for path in manifest["held_out_documents"])


def test_all_documents_of_the_training_split_can_be_healed_on(text: Path) -> None:
    healing = (text / "healing.txt").read_text()
    for number, path in names():
        assert (f"_{number}_0(" in healing) == (split_of(path) == "train")
    assert "_1_0(" in calibration_of(text)
    assert "_0_0(" not in calibration_of(text)


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception; BSD License", True),
        ("License agreement for matplotlib; Python Software Foundation License", True),
        ("LGPL-2.1-or-later; MIT", False),
        ("GPLv3", False),
        ("LicenseRef-NVIDIA-Proprietary", False),
        ("Commercial", False),
        ("", False),
    ],
)
def test_only_packages_that_state_a_permissive_licence_are_read(
    licence: str, permissive: bool
) -> None:
    assert is_permissive(licence) == permissive


@given(st.lists(st.text(max_size=9)), st.integers(1, 20))
def test_chunks_are_the_texts_in_their_order(texts: list[str], characters: int) -> None:
    parts = list(chunks(texts, characters))
    assert [text for part in parts for text in part] == texts
    assert all(sum(map(len, part)) >= characters for part in parts[:-1])
    assert parts


@pytest.mark.parametrize(("size", "millions"), [("30m", 30.4), ("130m", 131.6), ("350m", 355.9)])
def test_rungs_have_the_parameters_of_their_names(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[size].architecture, dropout=0.0)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_in_the_same_bytes(
    text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_EVALUATE_EVERY", 3)

    def stop(point: Point) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, text, RUN, "cpu", save_seconds=0, on_point=stop)
    assert not (tmp_path / "model").exists()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    train(tmp_path, text, RUN, "cpu")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_bytes() == (trained / "model" / name).read_bytes()
    one, other = (
        [json.loads(line) | {"seconds": 0} for line in (out / "log.jsonl").read_text().splitlines()]
        for out in (tmp_path, trained)
    )
    assert one == other
    assert [point["step"] for point in one] == [3, 6]
    assert one[-1]["validation_loss"] < one[0]["validation_loss"]
    assert one[-1]["learning_rate"] == pytest.approx(0)


def test_a_directory_of_another_run_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_EVALUATE_EVERY", 1)
    short = replace(RUN, tokens=1)
    train(tmp_path, text, short, "cpu", save_seconds=0)
    (tmp_path / "model").rename(tmp_path / "other")
    with pytest.raises(GacError, match="the checkpoint of another run"):
        train(tmp_path, text, replace(short, seed=1), "cpu")


CHOSEN = (
    "heads + MLP .8, KV .75",
    "heads + MLP .8, KV .75, free dims",
    "heads + MLP .8, KV .75, plain fits",
    "KV .5 latent",
)


@pytest.fixture(scope="module")
def measured(text: Path, trained: Path) -> Path:
    """A folder of results. Its rows were measured in three calls, after one of which it was cut."""
    out = text.parent / "results" / "tiny" / "rows.jsonl"
    command = ["measure", str(trained), str(out), "--text", str(text), "--max-tokens", "2048"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NEEDLES", "COPIES"):
            patch.setattr(scores, name, 1)
        assert main([*command, "--rows", "dense", CHOSEN[0]]) == 0
        with out.open("a") as file:
            file.write('{"row": "cut')
        assert main([*command, "--rows", "dense", *CHOSEN]) == 0
        assert main([*command, "--rows", "dense", *CHOSEN]) == 0
    for name in ("run.json", "log.jsonl"):
        (out.parent / name).write_bytes((trained / name).read_bytes())
    return out.parent


@pytest.mark.slow
def test_rows_are_appended_once_and_are_within_their_budgets(measured: Path) -> None:
    lines = (measured / "rows.jsonl").read_text().splitlines()
    rows = {row["row"]: row for row in map(json.loads, lines)}
    assert len(lines) == 1 + len(CHOSEN)
    assert list(rows) == ["dense", *CHOSEN]
    dense = rows["dense"]
    assert dense["kv_bytes"] == 2 * 2 * 2 * 2 * 32  # bytes, layers, keys and values, heads, size
    for name in CHOSEN:
        row, request = rows[name], ROWS[name].request
        assert request is not None
        assert row["parameters"] <= request.param_ratio * dense["parameters"]
        assert row["kv_elements"] <= request.kv_ratio * dense["kv_elements"]
        assert row["weight_bytes"] == 2 * row["parameters"]
        assert len(row["losses"]) == len(dense["losses"])
        assert all(math.isfinite(loss) for loss in row["losses"])
        assert ("tasks" in row) == (not is_variant(name))
    assert rows[CHOSEN[0]]["microseconds"] < dense["microseconds"]


@pytest.mark.slow
def test_the_loss_of_a_window_is_that_of_the_project_s_evaluation(
    text: Path, trained: Path, measured: Path, tmp_path: Path
) -> None:
    dense = json.loads((measured / "rows.jsonl").read_text().splitlines()[0])
    windows = read_tensor(text, "heldout.safetensors", "windows")[:1]
    losses = window_losses(runner(trained / "model", "cpu"), windows)
    assert losses == pytest.approx(dense["losses"][:1], abs=1e-5)
    first = tmp_path / "first.txt"
    first.write_text((text / "heldout.txt").read_text()[:12000])
    perplexity, tokens = evaluate(
        trained / "model", [first], sequence_length=WINDOW, max_tokens=WINDOW
    )
    assert tokens == WINDOW - 1
    assert math.log(perplexity) == pytest.approx(dense["losses"][0], abs=1e-5)


@pytest.mark.slow
def test_the_page_has_each_row_once_and_the_pairs(measured: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `dev`")
    assert main(["report", str(measured.parent)]) == 0
    page = (measured.parent / "README.md").read_text()
    # A row, a pair of dims, a pair of fits, and tasks.
    assert page.count("| heads + MLP .8, KV .75 |") == 4
    assert page.count("| KV .5 latent |") == 2
    assert page.count(", free dims |") == 0
    assert "No row of FP8 was measured" in page
    ElementTree.parse(measured.parent / "ladder.svg")
    assert (
        json.loads((measured / "run.json").read_text())["weights_sha256"]
        in (measured / "README.md").read_text()
    )


@pytest.mark.slow
def test_results_of_other_weights_are_refused(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `dev`")
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("run.json", "log.jsonl", "rows.jsonl"):
        (folder / name).write_bytes((measured / name).read_bytes())
    run = json.loads((folder / "run.json").read_text()) | {"weights_sha256": "0"}
    (folder / "run.json").write_text(json.dumps(run))
    assert main(["report", str(tmp_path)]) == 1
    assert ": rows of other weights, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("low rank .8", None),
        ("low rank .8, plain fits", CompressRequest(whitening="svd-llm", no_refit=True)),
    ],
)
def test_plain_fits_are_without_gradients_and_refits(
    name: str,
    fits: CompressRequest | None,
    trained: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[CompressRequest | None] = []

    def compress(
        model: Path, out: Path, plan: PlanRequest, request: CompressRequest | None, **others: Any
    ) -> None:
        asked.append(request)
        raise GacError("enough")

    monkeypatch.setattr(measuring, "compress", compress)
    monkeypatch.setattr(measuring, "calibrate", lambda *paths, **others: None)
    out = tmp_path / "rows.jsonl"
    assert main(["measure", str(trained), str(out), "--text", str(text), "--rows", name]) == 0
    assert asked == [fits]
    assert json.loads(out.read_text())["refused"] == "enough"


@pytest.mark.slow
def test_a_row_that_cannot_be_made_says_why(text: Path, trained: Path, tmp_path: Path) -> None:
    """This model has learned nothing yet that compression could lose, and healing bring back."""
    out, name = tmp_path / "rows.jsonl", f"{CHOSEN[0]}, healed"
    command = ["measure", str(trained), str(out), "--text", str(text), "--heal-tokens", "4096"]
    assert main([*command, "--max-tokens", "2048", "--rows", name]) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["row"] == name
    assert "has not become better, so nothing was written" in row["refused"]
    assert not any((trained / "work").glob("heads-*"))


@pytest.mark.slow
def test_vllm_serves_a_row_with_the_losses_of_the_reference(
    text: Path, trained: Path, measured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["measure", str(trained), str(out), "--text", str(text), "--rows", "dense, served"]
    assert main(command) == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    dense = json.loads((measured / "rows.jsonl").read_text().splitlines()[0])
    assert row["losses"] == pytest.approx(dense["losses"], rel=0.01)


def test_an_unknown_row_is_one_clear_error(
    trained: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["measure", str(trained), str(tmp_path / "out.jsonl"), "--text", str(text)]
    assert main([*command, "--rows", "half"]) == 1
    assert capsys.readouterr().err.startswith("error: half: no such row; ")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))


def test_needles_lie_at_all_depths_and_are_asked_for_at_the_end(tokenizer: Tokenizer) -> None:
    questions = needles(tokenizer, torch.arange(5, 2005), length=300, count=16)
    assert questions.tokens.shape == questions.answers.shape == (16, 300)
    depths = []
    for tokens, asked in zip(questions.tokens, questions.answers, strict=True):
        number = tokenizer.decode(tokens[asked].tolist())
        text = tokenizer.decode(tokens.tolist())
        assert len(number) == 6
        assert text.endswith(f" == {number}")
        name = text.rpartition("assert ")[2].partition(" ==")[0]
        assert text.count(f"\n{name} = {number}\n") == 1
        depths.append(text.index(f"\n{name} = ") / len(text))
    assert depths[:8] == sorted(depths[:8])
    assert min(depths) < 0.15
    assert max(depths) > 0.75


def test_the_second_copy_is_the_answer() -> None:
    questions = copies(torch.arange(2, 4000), length=101, count=3)
    for tokens, asked in zip(questions.tokens, questions.answers, strict=True):
        assert torch.equal(tokens[1:51], tokens[51:])
        assert int(asked.sum()) == 50 - 16
        assert bool(asked[-1])


def test_text_that_is_too_short_for_a_question_is_an_error() -> None:
    with pytest.raises(GacError, match="too few for a part of 50"):
        copies(torch.arange(40), length=101, count=1)


def test_scores_of_a_copier_are_perfect_and_of_a_uniform_model_chance() -> None:
    questions = copies(torch.arange(2, 1000), length=101, count=4)

    def copier(tokens: torch.Tensor) -> torch.Tensor:
        """After token t comes the one that came after its earlier occurrence."""
        logits = torch.zeros(*tokens.shape, 1000)
        following = torch.cat([tokens[:, 1:51], tokens[:, 1:52]], dim=1)
        return logits.scatter(2, following[..., None], 100.0)

    assert score(copier, questions) == {"exact": 1.0, "right": 1.0, "nats": pytest.approx(0)}
    uniform = score(lambda tokens: torch.zeros(*tokens.shape, 1000), questions)
    assert uniform["exact"] == uniform["right"] == 0
    assert uniform["nats"] == pytest.approx(math.log(1000))
