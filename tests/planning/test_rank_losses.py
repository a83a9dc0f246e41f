"""Ranks are judged by layers that were tried out, or by the gradients of their outputs alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import dense_models
from tests.support.command import error, result, usage
from tests.support.dense_models import config
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.statistics_file import check_stats
from vllm_gac.planning.losses import read_losses

OPTIONS = ("--max-tokens", 512, "--sequence-length", 64)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_models.write(tmp_path / "dense", config())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return dense_models.write_text(tmp_path / "text.txt")


@pytest.fixture
def stats(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Path]:
    def made(*options: object) -> Path:
        path = tmp_path / "stats.safetensors"
        result(capsys, "calibrate", dense, "--text", text, "--out", path, *OPTIONS, *options)
        return path

    return made


def test_beside_other_methods_only_ranks_are_judged_otherwise(
    dense: Path, stats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = stats()
    model = open_checkpoint(dense)
    measured = check_stats(file, model.layout, model.config_sha256)
    probe, kfac = (read_losses(file, model.layout, measured, kind) for kind in ("probe", "kfac"))
    for index in range(2):
        for name, curve in kfac[index].items():
            ranks = name.startswith("rank.")
            assert np.array_equal(curve, probe[index][name]) == (not ranks)
            assert len(curve) == len(probe[index][name])
    asked = ("plan", dense, "--stats", file, "--kv-ratio", 0.75, "--param-ratio", 0.8)
    plan = result(capsys, *asked, "--method", "heads,prune,lowrank", "--sensitivity", "kfac")
    assert plan["expected_loss"] > 0
    said = error(capsys, *asked, "--sensitivity", "kfac")
    assert said == "--sensitivity kfac is of the ranks of linears; add lowrank to --method"


def test_without_statistics_gradients_tell_nothing(
    dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = usage(capsys, "plan", dense, "--kv-ratio", 0.75, "--sensitivity", "kfac")
    assert "--sensitivity kfac needs --stats" in said
