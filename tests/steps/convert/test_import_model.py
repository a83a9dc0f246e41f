"""`vllm-gac import` turns a model of another tool into a gac directory."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.importers.low_rank_models import SOME, write_low_rank
from tests.importers.tools import assert_same_logits
from tests.support.command import error, result
from tests.support.dense_models import write_tokenizer
from vllm_gac.checkpoint.locate import TEMPLATES
from vllm_gac.checkpoint.open import TensorInfo, open_checkpoint
from vllm_gac.errors import DiskError
from vllm_gac.steps.convert.import_model import import_model


def tensors(directory: Path) -> list[TensorInfo]:
    return list(open_checkpoint(directory).tensors.values())


def test_a_model_of_another_tool_becomes_a_gac_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, model = write_low_rank(tmp_path / "source", "asvd", SOME)
    write_tokenizer(source / "tokenizer.json", 128)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / TEMPLATES).mkdir()
    (source / TEMPLATES / "rag.jinja").write_text("{{ documents }}")
    (source / "modeling_x.py").write_text("raise SystemExit")
    out = tmp_path / "out"
    done = result(capsys, "import", source, out, "--quiet")
    assert (done["format"], done["dtype"], done["tokenizer"]) == ("asvd", "float32", True)
    assert_same_logits(out, model, "gac")
    assert {path.name for path in out.iterdir()} - {i.file for i in tensors(out)} == {
        "README.md",
        TEMPLATES,
        "chat_template.jinja",
        "config.json",
        "digests.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert (out / TEMPLATES / "rag.jinja").read_text() == "{{ documents }}"


def test_code_of_a_tokenizer_is_not_copied_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = write_low_rank(tmp_path / "source", "asvd", SOME)
    said = source / "tokenizer_config.json"
    said.write_text(json.dumps({"auto_map": {"AutoTokenizer": [None, "tokenization_x.X"]}}))
    (source / "tokenization_x.py").write_text("raise SystemExit")
    import_model(source, tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "tokenization_x.py").exists()
    assert f"{said}: auto_map" in caplog.text


@pytest.mark.parametrize("file", ["generation_config.json", f"{TEMPLATES}/rag.jinja"])
def test_a_resumed_import_refuses_other_files_beside_the_base(file: str, tmp_path: Path) -> None:
    source, _ = write_low_rank(tmp_path / "source", "asvd", SOME)
    base, out = tmp_path / "base", tmp_path / "out"
    (base / TEMPLATES).mkdir(parents=True)
    shutil.copy(source / "config.json", base)
    import_model(source, out, base=base, progress=False)
    import_model(source, out, base=base, resume=True, progress=False)
    (base / file).write_text("{}")
    with pytest.raises(DiskError, match=str(out)):
        import_model(source, out, base=base, resume=True, progress=False)


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


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", '{"gac": 1}'),
        ("config.json", '{"gac": {"source": 1}}'),
        ("config.json", '{"gac": {}'),
        ("chat_template.json", '{"chat_template": []}'),
    ],
)
def test_a_broken_file_of_the_base_is_refused_before_the_work(
    file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, base, out = (tmp_path / name for name in ("source", "base", "out"))
    write_low_rank(source, "asvd", SOME)
    base.mkdir()
    (base / file).write_text(text)
    said = error(capsys, "import", source, out, "--base", base, "--quiet")
    assert str(base / file) in said
    assert not out.with_name("out.partial").exists()


def test_the_card_is_that_of_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its id is its own, not that of the model that it was made from itself."""
    source, _ = write_low_rank(tmp_path / "source", "asvd", SOME)
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: org/other\n---\n")
    base = tmp_path / "models--org--base" / "snapshots" / ("0" * 40)
    base.mkdir(parents=True)
    shutil.copy(source / "config.json", base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/before\n---\n")
    result(capsys, "import", source, tmp_path / "out", "--base", base, "--quiet")
    card = (tmp_path / "out" / "README.md").read_text()
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "license: apache-2.0\nbase_model:\n- org/base\n" in card
    assert raw["gac"]["source"]["base_model"] == {"id": "org/base", "revision": "0" * 40}
