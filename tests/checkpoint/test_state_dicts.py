"""State dicts give the tensors of the model; all else that a file may hold is refused."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.load import LoadConfig

from tests.serving.stubs import ModelConfigStub
from tests.support.bombs import Bomb
from tests.support.dense_models import config, weights, write, write_bin
from vllm_gac.checkpoint.headers import PAGE
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.loader import GacModelLoader

UP = "model.layers.0.mlp.up_proj.weight"


def holds(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> bool:
    assert list(all_faults(checkpoint)) == []
    with checkpoint.reader() as read:
        return all(torch.equal(read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("shards", [1, 2])
def test_state_dicts_have_the_tensors_of_the_model(shards: int, tmp_path: Path) -> None:
    directory = write_bin(tmp_path / "bin", config(), shards=shards)
    assert holds(open_checkpoint(directory), weights(config(), torch.bfloat16))


def test_a_state_dict_as_a_module_gives_it_is_read(tmp_path: Path) -> None:
    """An OrderedDict with metadata, parameters, and tied embeddings in one storage."""
    raw, module = config(tie_word_embeddings=True), torch.nn.Module()
    tensors = weights(raw, torch.bfloat16)
    for name, tensor in tensors.items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))
    state = module.state_dict(keep_vars=True)
    for name in list(state):
        state[name.replace("/", ".")] = state.pop(name)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert holds(open_checkpoint(write_bin(tmp_path / "bin", raw, state)), tensors)


def test_safetensors_beside_them_come_first(tmp_path: Path) -> None:
    model = write_bin(tmp_path / "bin", config())
    write(tmp_path / "twin", config())
    (tmp_path / "twin" / "model.safetensors").rename(model / "model.safetensors")
    assert {i.file for i in open_checkpoint(model).tensors.values()} == {"model.safetensors"}


def test_vllm_is_given_safetensors_only(tmp_path: Path) -> None:
    loader = GacModelLoader(LoadConfig(load_format="gac"))
    stub: Any = ModelConfigStub(write_bin(tmp_path / "bin", config()))
    with pytest.raises(CheckpointError, match="safetensors"):
        loader._preflight(stub)


Tensors = dict[str, Any]


def rewritten(change: Callable[[Tensors], Any]) -> Callable[[Path], object]:
    """The file holds what `change` makes of its tensors."""
    return lambda file: torch.save(change(weights(config(), torch.bfloat16)), file)


def cut(share: float) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])


def compressed(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            packed = zipfile.ZIP_DEFLATED if name.endswith("data/0") else zipfile.ZIP_STORED
            archive.writestr(name, content, packed)


def old_format(file: Path) -> None:
    tensors = weights(config(), torch.bfloat16)
    torch.save(tensors, file, _use_new_zipfile_serialization=False)


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 160\n")


# By case: what is done to the file, and what the message names beside it.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (rewritten(lambda t: {UP: Bomb(Path("marker"))}), PAGE),
    "a whole module": (rewritten(lambda t: torch.nn.Linear(2, 2)), "torch.nn.modules.linear"),
    "a dict of dicts": (rewritten(lambda t: {"state_dict": t}), "state_dict"),
    "a number among tensors": (rewritten(lambda t: t | {"epoch": 3}), "epoch"),
    "one tensor": (rewritten(lambda t: t[UP]), "state_dict()"),
    "before torch 1.6": (old_format, PAGE),
    "nothing": (cut(0), PAGE),
    "all but the end": (cut(0.999), PAGE),
    "a compressed member": (compressed, "data/0 "),
    "a pointer": (pointer, "git lfs pull"),
    "transposed": (rewritten(lambda t: t | {UP: t[UP].T.contiguous().T}), UP),
    "sparse": (rewritten(lambda t: t | {UP: t[UP].to_sparse()}), UP),
    "negated by a bit": (rewritten(lambda t: t | {UP: torch._neg_view(t[UP])}), UP),
    "complex": (rewritten(lambda t: t | {UP: t[UP].to(torch.complex64)}), UP),
    "another shape": (rewritten(lambda t: t | {UP: t[UP][1:].clone()}), UP),
    "NaN": (rewritten(lambda t: t | {UP: t[UP] * torch.nan}), UP),
    "missing": (rewritten(lambda t: {n: t[n] for n in t if n != UP}), UP),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_state_dicts_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, named = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    file = write_bin(tmp_path / "bin", config()) / "pytorch_model.bin"
    change(file)
    try:
        said = "\n".join(all_faults(open_checkpoint(file.parent)))
    except CheckpointError as e:
        said = str(e)
    assert file.name in said or "missing" in said
    assert named in said
    assert "weights_only=False" not in said
    assert not Path("marker").exists()
