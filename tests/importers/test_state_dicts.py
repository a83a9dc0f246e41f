"""`vllm-gac import` of state dicts; and of pickled modules, by way of the guide's few lines."""

from pathlib import Path

import pytest
import torch

from tests.importers.layer_models import heterogeneous
from tests.importers.low_rank_models import RANKS, TOOLS, low_rank
from tests.importers.tools import assert_same_logits
from tests.support.command import error, result
from tests.support.dense_models import config, write, write_bin, write_text
from tests.support.imports import ROOT

GUIDE = ROOT / "docs" / "guide.md"


def test_state_dicts_are_compressed_as_safetensors_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text.txt")
    twin = write(tmp_path / "twin", config(), torch.bfloat16)
    model = write_bin(tmp_path / "bin", config(), shards=2)
    asked = ("--kv-ratio", 0.5, "--method", "heads", "--max-tokens", 512, "--quiet")
    for source, out in ((twin, "of twin"), (model, "of bin")):
        result(capsys, "compress", source, "--out", tmp_path / out, *asked, "--calibration", text)
    of_twin, of_bin = (
        [path.read_bytes() for path in sorted((tmp_path / f"of {name}").glob("*.safetensors"))]
        for name in ("twin", "bin")
    )
    assert of_twin == of_bin
    assert result(capsys, "inspect", model)["format"] == "dense"
    assert "nothing to convert" in error(capsys, "import", model, tmp_path / "out")


def test_a_state_dict_of_any_name_takes_the_config_of_the_model_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, raw = TOOLS["svd-llm"], config()
    base, file, out = write(tmp_path / "base", raw), tmp_path / "merge.pt", tmp_path / "out"
    _, model = low_rank(tool, raw, RANKS)
    torch.save({tool.rename(name): t for name, t in model.state_dict().items()}, file)
    assert "--base" in error(capsys, "import", file, out)
    done = result(capsys, "import", file, out, "--base", base, "--quiet")
    assert (done["format"], done["tokenizer"]) == ("svd-llm", True)
    assert_same_logits(out, model, "gac")


def test_the_guides_lines_make_safetensors_of_a_pickled_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model as LLM-Pruner leaves it: fewer heads, channels and layers than its config says."""
    raw = config(num_key_value_heads=4, head_dim=12, num_hidden_layers=2)
    fewer = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 61}
    model = heterogeneous(raw, [fewer, {}])
    model.config.num_hidden_layers = 5
    monkeypatch.chdir(tmp_path)
    torch.save({"model": model, "tokenizer": None}, "pickle.bin")
    section = GUIDE.read_text().partition("### Models in a pickle")[2]
    exec(section.partition("```python")[2].partition("```")[0], {})
    done = result(capsys, "import", "safetensors", "out", "--quiet")
    assert done["format"] == "hf-pruned"
    assert_same_logits(tmp_path / "out", model, "gac")
