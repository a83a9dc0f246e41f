"""`vllm-gac import` turns every format into a gac directory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.importers import layer_models
from tests.importers.low_rank_models import SOME, write_low_rank
from tests.importers.tools import assert_same_logits, write
from tests.support.command import error, result
from tests.support.dense_models import config, write_tokenizer
from vllm_gac.checkpoint.open import TensorInfo, open_checkpoint

Written = tuple[Path, nn.Module]
RAW = config(num_hidden_layers=3)


def tensors(directory: Path) -> list[TensorInfo]:
    return list(open_checkpoint(directory).tensors.values())


def per_layer_config(directory: Path) -> Written:
    layers = [{"skip": ["attention"]}, {"intermediate_size": 41}, {"num_key_value_heads": 1}]
    model = layer_models.heterogeneous(RAW, layers)
    written = {"per_layer_config": {str(i): dims for i, dims in enumerate(layers)}}
    return write(directory, RAW | written, model), model


FORMATS: dict[str, Callable[[Path], Written]] = {
    "asvd": lambda directory: write_low_rank(directory, "asvd", SOME),
    "per-layer-config": per_layer_config,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_a_gac_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = FORMATS[name](tmp_path / "source")
    write_tokenizer(source / "tokenizer.json", 128)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "modeling_x.py").write_text("raise SystemExit")
    out = tmp_path / "out"
    done = result(capsys, "import", source, out, "--quiet")
    assert (done["format"], done["dtype"], done["tokenizer"]) == (name, "float32", True)
    assert_same_logits(out, model, "gac")
    assert {path.name for path in out.iterdir()} - {i.file for i in tensors(out)} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "digests.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    }


def test_nan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, out = "model.layers.1.self_attn.v_proj.BLinear.weight", tmp_path / "out"
    source, _ = write_low_rank(tmp_path / "nan", "asvd", SOME, lambda t: t[name].fill_(torch.nan))
    assert f"{name}: contains NaN or infinity" in error(capsys, "import", source, out, "--quiet")
    assert not out.exists()


def test_norms_in_fp32_stay_so_and_decide_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: t.bfloat16() for n, t in tensors.items() if t.ndim == 2})

    source, _ = write_low_rank(tmp_path / "source", "asvd", SOME, halve)
    done = result(capsys, "import", source, tmp_path / "out", "--quiet")
    assert done["dtype"] == "bfloat16"
    kinds = {len(info.shape): info.dtype for info in tensors(tmp_path / "out")}
    assert kinds == {1: "F32", 2: "BF16"}
