"""The Mistral twin has the same weights, and its sliding window has an effect."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralForCausalLM

from tools.demo_model.mistral_twin import main
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.demo import MODEL

WINDOW = 16


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("twin") / "mistral"
    assert main([str(out), "--sliding-window", str(WINDOW)]) == 0
    return out


def test_it_fits_the_layout(twin: Path) -> None:
    checkpoint = open_checkpoint(twin)
    assert list(faults(checkpoint)) == []
    assert checkpoint.config.model_type == "mistral"
    assert checkpoint.config.sliding_window == WINDOW
    assert checkpoint.layout == open_checkpoint(MODEL).layout


def test_it_equals_the_llama_within_the_window_and_differs_beyond(twin: Path) -> None:
    mistral = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    llama = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert isinstance(mistral, MistralForCausalLM)
    ids = AutoTokenizer.from_pretrained(twin)(
        (MODEL / "README.md").read_text(), return_tensors="pt"
    ).input_ids[:, : 4 * WINDOW]
    with torch.no_grad():
        difference = (mistral(ids).logits - llama(ids).logits).abs().amax(dim=-1)[0]
    assert difference[:WINDOW].max() < 1e-4
    assert difference[WINDOW:].min() > 1e-2


@pytest.mark.parametrize("window", ["0", "-1"])
def test_a_window_that_sees_nothing_is_refused(
    window: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "out"), f"--sliding-window={window}"]) == 1
    assert "expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_work_that_others_keep_beside_it_stays(tmp_path: Path) -> None:
    (tmp_path / "twin.partial").mkdir()
    (tmp_path / "twin.partial" / "thesis.txt").write_text("years")
    assert main([str(tmp_path / "twin")]) == 0
    assert (tmp_path / "twin.partial" / "thesis.txt").read_text() == "years"
    assert {path.name for path in tmp_path.iterdir()} == {"twin", "twin.partial"}
