"""`vllm-gac heal` writes a better model of the same dims, or none and one sentence why."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.low_rank_models import SOME, write_low_rank
from tests.steps.heal.models import (
    FAST,
    compressed_config,
    dense_config,
    flags,
    write_all,
    write_model,
    write_near,
)
from tests.support import dense_models
from tests.support.command import error, result, usage
from tests.support.dense_models import write_text, write_tokenizer
from tests.support.hub import files_of
from tests.support.stored_models import change_tensors, stored_tensors
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError, HealingError
from vllm_gac.healing import train
from vllm_gac.healing.state_file import write_state
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.options import options_of
from vllm_gac.steps.heal import choices, inputs
from vllm_gac.steps.heal.heal import Healed, heal
from vllm_gac.steps.heal.request import HealRequest
from vllm_gac.steps.verify import verify


def healed(directory: Path, out: str = "out", **options: Any) -> Healed:
    """Heal with the options of a request and the arguments of `heal`."""
    asked = FAST | {name: options.pop(name) for name in options_of(HealRequest) if name in options}
    student, teacher, text = (directory / name for name in ("student", "teacher", "text.txt"))
    request = HealRequest(**asked)
    return heal(student, teacher, [text], directory / out, request, progress=False, **options)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_divergence_falls_and_all_dims_stay(tmp_path: Path, kind: Any) -> None:
    student, _, _ = write_all(tmp_path)
    rank = 8 if kind == "lora" else None
    done = healed(tmp_path, train=kind, lora_rank=rank)
    assert done.after.divergence < 0.95 * done.before.divergence
    assert done.recovered > 0.05
    out = open_checkpoint(tmp_path / "out")
    assert out.layout == open_checkpoint(student).layout
    assert verify(tmp_path / "out").faults == []
    old, new = stored_tensors(student), stored_tensors(tmp_path / "out")
    same = {name for name in old if torch.equal(old[name], new[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(new[name].dtype == old[name].dtype for name in old)


def test_the_healed_model_has_the_reported_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healing the result again measures it before the first step."""
    monkeypatch.setattr(train, "_MUCH_WORSE", math.inf)  # both are random
    write_all(tmp_path)
    raw = compressed_config()
    raw["gac"] |= {"source": {"measured": {}, "max_loss": {"measured": {}}, "format": "gac"}}
    write_model(tmp_path / "student", raw)
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "text.txt").read_text()[::-1])
    first = healed(tmp_path, held_out=[other])
    (tmp_path / "student").rename(tmp_path / "before")
    (tmp_path / "out").rename(tmp_path / "student")
    again = healed(tmp_path, held_out=[other])
    assert again.before == first.after
    source = json.loads((tmp_path / "student" / "config.json").read_text())["gac"]["source"]
    assert {"measured", "max_loss", "format"} & source.keys() == {"format"}
    entry = source["heal"]
    assert entry["divergence"] == {
        "before": first.before.divergence,
        "after": first.after.divergence,
    }
    assert (entry["teacher"], entry["tokens"]) == ("teacher", first.tokens)
    card = (tmp_path / "student" / "README.md").read_text()
    assert "healed by vllm-gac" in card
    assert f"Trained on {first.tokens:,} tokens to predict what teacher predicts" in card


def test_low_rank_models_of_other_tools_are_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_MUCH_WORSE", math.inf)  # both are random
    _, teacher, text = write_all(tmp_path)
    shutil.rmtree(teacher)
    raw = dense_models.config()
    dense_models.write(teacher, raw)
    student, _ = write_low_rank(tmp_path / "tool", "svd-llm", SOME)
    write_tokenizer(student / "tokenizer.json", raw["vocab_size"])
    _, before = open_any_format(student)
    done = heal(student, teacher, [text], tmp_path / "out", HealRequest(**FAST))
    assert done.after.divergence < done.before.divergence
    assert open_checkpoint(tmp_path / "out").layout == before.layout
    source = open_checkpoint(tmp_path / "out").raw_config["gac"]["source"]
    assert (source["format"], source["heal"]["teacher"]) == ("svd-llm", "teacher")


class Stopped(Exception):  # noqa: N818
    """Stands for a kill."""


def save_and_stop(*arguments: Any) -> None:
    write_state(*arguments)
    raise Stopped


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    _, teacher, _ = write_all(tmp_path)
    write_near(tmp_path / "student", teacher)
    # A rate that is too high makes the run go back, too.
    options = {"train": kind, "learning_rate": 5e-3 if kind == "full" else 1e-2}
    undisturbed = healed(tmp_path, "undisturbed", **options)
    divergences = [divergence for _, divergence, _ in undisturbed.curve]
    assert max(divergences) > undisturbed.before.divergence, "never went back"

    def once(*arguments: Any) -> None:
        monkeypatch.setattr(train, "write_state", write_state)
        raise Stopped

    def after_saving(*arguments: Any) -> None:
        monkeypatch.setattr(train, "write_state", once)
        save_and_stop(*arguments)

    monkeypatch.setattr(train, "_SAVING", 0)  # save each time
    for number in range(20):
        monkeypatch.setattr(train, "write_state", after_saving)
        try:
            healed(tmp_path, resume=number > 0, **options)
        except Stopped:
            continue
        break
    assert number > 4
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")
    assert not (tmp_path / "out.partial").exists()


def test_a_run_goes_on_with_as_many_tokens_at_once_and_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path)
    monkeypatch.setattr(train, "write_state", save_and_stop)
    with pytest.raises(Stopped):
        healed(tmp_path)
    monkeypatch.setattr(inputs, "_sequences", lambda *_: 2 * [torch.ones(64, 32).long()])
    with pytest.raises(CheckpointError, match="tokens_sha256"):
        healed(tmp_path, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(choices, "tokens_at_once", lambda *_: 64)
    healed(tmp_path, resume=True)
    monkeypatch.undo()
    healed(tmp_path, "undisturbed")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")


def test_a_result_that_is_no_better_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, teacher, text = write_all(tmp_path)
    near = write_near(tmp_path / "near", teacher)
    args = ("heal", near, "--teacher", teacher, "--text", text, "--out", tmp_path / "out")
    said = error(capsys, *args, *flags(FAST | {"learning_rate": 1000}), "--quiet")
    assert f"{near}: " in said
    assert "--tokens" in said
    assert "--learning-rate" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "near",
        "student",
        "teacher",
        "text.txt",
    ]


def test_the_command_prints_the_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # of some scheduler; without WORLD_SIZE it is alone
    student, teacher, text = write_all(tmp_path)
    args = ("heal", student, "--teacher", teacher, "--text", text, "--out", tmp_path / "out")
    done = result(capsys, *args, *flags(FAST), "--quiet")
    assert done["after"]["divergence"] < done["before"]["divergence"]
    assert len(done["curve"]) == 7
    assert 0 < done["recovered"] < 1
    assert f"{tmp_path / 'out'}: exists" in error(capsys, *args, *flags(FAST))
    assert "--lora-rank" in usage(capsys, *args, "--train", "full", "--lora-rank", 3)


def refused(directory: Path, **options: Any) -> str:
    with pytest.raises((CheckpointError, HealingError)) as caught:
        healed(directory, **options)
    assert not (directory / "out").exists()
    assert not (directory / "out.partial").exists()
    return str(caught.value)


def test_a_compressed_teacher_and_one_of_other_tokens_are_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    write_model(tmp_path / "teacher", dense_config())
    write_tokenizer(tmp_path / "teacher" / "tokenizer.json", 100)
    assert "tokenizer.json: numbers its tokens otherwise than" in refused(tmp_path)
    write_model(tmp_path / "teacher", compressed_config())
    assert "is compressed already; start from the dense model" in refused(tmp_path)


def test_invalid_texts_and_students_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher, text = write_all(tmp_path)
    text.write_text("")
    assert "text.txt: no text" in refused(tmp_path)
    write_text(text, 40)
    assert "one sequence of 32 tokens; one to train on and one to measure" in refused(tmp_path)
    text.unlink()
    assert "text.txt: no such text file to heal on" in refused(tmp_path)
    write_text(text, 3000)
    assert "nowhere: no such text file to measure" in refused(
        tmp_path, held_out=[tmp_path / "nowhere"]
    )
    assert "sequences of 1 token" in refused(tmp_path, sequence_length=1)
    with pytest.raises(CheckpointError, match="--text"):
        heal(student, teacher, [text, text], tmp_path / "out", HealRequest(**FAST))
    shutil.rmtree(student)
    shutil.copytree(teacher, student)
    assert "is dense: nothing was lost" in refused(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, but RANK, LOCAL_RANK" in refused(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "two")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "WORLD_SIZE is 'two'" in refused(tmp_path)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    """They come from Python; the command line refuses some of them by itself."""
    write_all(tmp_path)
    for option, value, said in (
        ("learning_rate", float("nan"), "--learning-rate nan: expected a number from"),
        ("lora_rank", 10**7, "--lora-rank 10000000: expected 1,000,000 at most"),
        ("batch_tokens", 10**9, "--batch-tokens 1000000000: one step would take more than"),
        ("train", "both", "--train both: expected one of auto, full, lora"),
        ("held_out", [tmp_path / "text.txt"], "is given as --held-out and has the bytes of a"),
        ("teacher_revision", "v1", "--teacher-revision v1: "),
    ):
        assert said in refused(tmp_path, **{option: value})


LOUD_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 1,
    "attention_factor": 1.2,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 96}, "96 tokens in the vocabulary, the compressed model has 128"),
        ({"num_hidden_layers": 3}, "3 layers, the compressed model has 2"),
        ({"hidden_size": 32}, "32 numbers in a hidden state, the compressed model has 28"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "its model_type is "),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, "its RoPE is "),
        # The same frequencies, but scores are larger.
        ({"rope_parameters": LOUD_ROPE}, "its RoPE is "),
        ({"rms_norm_eps": 1e-3}, "its rms_norm_eps is "),
    ],
)
def test_a_teacher_with_another_config_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_all(tmp_path)
    write_model(tmp_path / "teacher", dense_config(**changes), seed=1)
    assert said in refused(tmp_path)


def test_a_teacher_with_other_weights_is_refused(tmp_path: Path) -> None:
    write_all(tmp_path)
    path = tmp_path / "student" / "config.json"
    raw = json.loads(path.read_text())
    weights = open_checkpoint(tmp_path / "teacher").weights_sha256
    raw["gac"]["source"] = {"model_weights_sha256": weights}
    path.write_text(json.dumps(raw))
    write_model(tmp_path / "teacher", dense_config(), seed=2)
    assert weights != open_checkpoint(tmp_path / "teacher").weights_sha256
    assert "model_weights_sha256" in refused(tmp_path)


@pytest.mark.parametrize(
    ("scale", "named"), [(100, "--teacher"), (math.nan, "teacher/model.safetensors: ")]
)
def test_a_teacher_that_is_worse_than_its_student_is_refused(
    scale: float, named: str, tmp_path: Path
) -> None:
    write_all(tmp_path)
    path = tmp_path / "teacher" / "model.safetensors"
    change_tensors(path, lambda t: t["model.norm.weight"].mul_(scale))
    assert named in refused(tmp_path)


def test_an_unused_lora_rank_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_all(tmp_path)
    healed(tmp_path, lora_rank=4)
    assert "--lora-rank 4" in caplog.text


def test_a_lora_rank_beyond_the_matrices_is_refused(tmp_path: Path) -> None:
    student, _, _ = write_all(tmp_path)
    matrices = [
        info.shape
        for name, info in open_checkpoint(student).tensors.items()
        if name.startswith("model.layers.") and len(info.shape) > 1
    ]
    most = max(min(shape[-2:]) for shape in matrices)
    said = refused(tmp_path, train="lora", lora_rank=most + 1)
    assert f"--lora-rank {most + 1}" in said
    assert healed(tmp_path, train="lora", lora_rank=most).adapter_rank == most


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_on_a_gpu_a_resumed_run_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    write_all(tmp_path)
    write_model(tmp_path / "student", compressed_config(dtype="bfloat16"), dtype=torch.bfloat16)
    options = {"train": kind, "device": "cuda"}
    done = healed(tmp_path, "undisturbed", **options)
    assert done.after.divergence < 0.95 * done.before.divergence
    monkeypatch.setattr(train, "write_state", save_and_stop)
    with pytest.raises(Stopped):
        healed(tmp_path, **options)
    monkeypatch.undo()
    healed(tmp_path, resume=True, **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")
