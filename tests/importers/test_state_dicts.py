"""Weights in pytorch_model*.bin are read like safetensors, and no code in them runs."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.load import LoadConfig

from tests.checkpoint.pickles.archives import write as write_archive
from tests.checkpoint.pickles.bombs import Bomb
from tests.importers.pickled_models import saved, svd_llm
from tests.importers.tools import MISTRAL
from tests.serving.stubs import ModelConfigStub
from tests.support.command import error, result
from tests.support.dense_models import config, weights, write, write_text
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.cli import main
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.loader import GacModelLoader

INDEX = "pytorch_model.bin.index.json"
FORMS: dict[str, dict[str, Any]] = {
    "one file": {},
    "one file of old": {"_use_new_zipfile_serialization": False},
    "shards": {"shards": 3},
    "shards without an index": {"shards": 2, "index": False},
}


def write_bin(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    index: bool = True,
    **options: Any,
) -> Path:
    """Write the model of `dense_models.write` as transformers did before safetensors."""
    write(directory, raw, torch.bfloat16)
    (directory / "model.safetensors").unlink()
    tensors = dict(tensors or weights(raw, torch.bfloat16))
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin", **options)
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        names = list(tensors)[number::shards]
        torch.save({name: tensors[name] for name in names}, directory / file, **options)
        weight_map |= dict.fromkeys(names, file)
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("form", FORMS)
def test_they_are_the_tensors_of_the_model(form: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_bin(tmp_path / "bin", config(), **FORMS[form]))
    assert list(faults(checkpoint, finite=True)) == []
    with checkpoint.reader() as read:
        for name, expected in weights(config(), torch.bfloat16).items():
            assert torch.equal(read(name), expected)


def test_a_state_dict_as_a_module_gives_it(tmp_path: Path) -> None:
    """An OrderedDict with metadata, whose tied embeddings have one storage."""
    module = torch.nn.Module()
    raw = config(tie_word_embeddings=True)
    for name, tensor in weights(raw, torch.bfloat16).items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))
    state = module.state_dict()
    for name in list(state):
        state[name.replace("/", ".")] = state.pop(name)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    directory = write_bin(tmp_path / "bin", raw)
    torch.save(state, directory / "pytorch_model.bin")
    assert list(faults(open_checkpoint(directory), finite=True)) == []


def test_they_are_compressed_as_safetensors_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text.txt")
    twin = write(tmp_path / "twin", config(), torch.bfloat16)
    model = write_bin(tmp_path / "bin", config(), shards=2)
    asked = ("--kv-ratio", 0.5, "--method", "heads", "--max-tokens", 512, "--quiet")
    for source, out in ((twin, "of twin"), (model, "of bin")):
        result(capsys, "compress", source, "--out", tmp_path / out, *asked, "--calibration", text)
    of_twin, of_bin = (
        sorted((tmp_path / f"of {n}").glob("*.safetensors")) for n in ("twin", "bin")
    )
    assert [path.read_bytes() for path in of_twin] == [path.read_bytes() for path in of_bin]
    measured = [
        result(capsys, "evaluate", source, "--text", text, "--max-tokens", 500)
        for source in (twin, model)
    ]
    assert measured[0] == measured[1]
    assert result(capsys, "inspect", model)["format"] == "dense"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", ["directory", "file"])
def test_import_makes_safetensors_of_them(
    form: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = config(**MISTRAL)
    model, out = write_bin(tmp_path / "bin", raw, **FORMS[form]), tmp_path / "out"
    source = model if given == "directory" else next(model.glob("pytorch_model*.bin"))
    done = result(capsys, "import", source, out, "--quiet")
    assert (done["format"], done["dtype"], done["tokenizer"]) == ("dense", "bfloat16", True)
    made = json.loads((out / "config.json").read_text())
    assert made == raw | {"dtype": "bfloat16"}
    stored = {k: v for path in out.glob("*.safetensors") for k, v in load_file(path).items()}
    expected = weights(raw, torch.bfloat16)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    assert result(capsys, "plan", out, "--kv-ratio", 0.5)["kv_ratio"] == 0.5


def test_safetensors_beside_them_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_bin(tmp_path / "bin", config())
    write(tmp_path / "twin", config())
    (tmp_path / "twin" / "model.safetensors").rename(model / "model.safetensors")
    assert {i.file for i in open_checkpoint(model).tensors.values()} == {"model.safetensors"}
    assert "nothing to convert" in error(capsys, "import", model, tmp_path / "out")


def test_import_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["import", str(write_bin(tmp_path / "bin", config())), str(out), "--quiet"]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith(f"Compress it: vllm-gac compress {out} --out DIR")
    )


def test_vllm_is_given_safetensors_only(tmp_path: Path) -> None:
    model = write_bin(tmp_path / "bin", config())
    loader = GacModelLoader(LoadConfig(load_format="gac"))
    with pytest.raises(CheckpointError, match="'vllm-gac import' makes safetensors of them"):
        loader._preflight(ModelConfigStub(model))  # type: ignore[arg-type]


class TestRefused:
    """Refused in one sentence, and no code runs."""

    @pytest.fixture(autouse=True)
    def _setup(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.tensors = weights(config(), torch.bfloat16)
        self.path, self.capsys = tmp_path / "bin", capsys

    def refused(self, message: str, **options: Any) -> None:
        if not self.path.exists():
            write_bin(self.path, config(), self.tensors, **options)
        assert message in error(self.capsys, "inspect", self.path)

    def test_a_tensor_in_pieces(self) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        self.tensors[name] = self.tensors[name].T.contiguous().T
        self.refused(f"{name}: of shape [96, 48] with strides [1, 96], not in one piece")

    def test_many_tensors_of_one_storage(self) -> None:
        flat = torch.zeros(1 << 20, dtype=torch.bfloat16)
        self.tensors |= {f"{number}": flat for number in range(9)}
        self.refused("more than twice the file's size")

    def test_a_tensor_twice(self) -> None:
        write_bin(self.path, config(), self.tensors, shards=2, index=False)
        torch.save(self.tensors, self.path / "pytorch_model-2.bin")
        self.refused("model.embed_tokens.weight is also in pytorch_model-00001-of-00002.bin")

    def test_an_index_that_says_otherwise(self) -> None:
        write_bin(self.path, config(), self.tensors, shards=2)
        index = json.loads((self.path / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = index["weight_map"]["lm_head.weight"]
        index["weight_map"]["extra"] = index["weight_map"]["lm_head.weight"]
        (self.path / INDEX).write_text(json.dumps(index))
        self.refused(f"{INDEX}: ")
        index["weight_map"] = {"model.norm.weight": "../pytorch_model.bin"}
        (self.path / INDEX).write_text(json.dumps(index))
        self.refused("is not the name of a .bin file in the model directory")

    def test_a_whole_model(self) -> None:
        write_bin(self.path, config(), self.tensors)
        saved(self.path, svd_llm(), "pytorch_model.bin")
        self.refused("not a state dict, tensors by name; 'vllm-gac import' converts whole models")

    @pytest.mark.parametrize("container", ["zip", "legacy"])
    def test_a_bomb(self, container: str, tmp_path: Path) -> None:
        write_bin(self.path, config(), self.tensors)
        program = pickle.dumps({"model.norm.weight": Bomb(tmp_path / "marker")}, protocol=2)
        write_archive(self.path / "pytorch_model.bin", container, program)
        self.refused("pytorch_model.bin: ")
        assert not (tmp_path / "marker").exists()

    def test_a_file_by_another_name(self, tmp_path: Path) -> None:
        torch.save(self.tensors, tmp_path / "weights.pt")
        said = error(self.capsys, "import", tmp_path / "weights.pt", tmp_path / "out")
        assert "put it beside the model's config.json as pytorch_model.bin" in said
