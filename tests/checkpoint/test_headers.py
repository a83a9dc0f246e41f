"""Which files of a directory are read, and which are refused."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.bombs import Bomb
from tests.support.model_files import (
    config,
    framed,
    read_index,
    refusal,
    shard_bytes,
    tensors_of,
    write_index,
    write_model,
)
from vllm_gac.checkpoint.locate import INDEX_FILE
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError

DOWN = "model.layers.0.mlp.down_proj.weight"


def test_what_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for path in (tmp_path / "nowhere", tmp_path / "model.bin", Path("org/model\0")):
        with pytest.raises(CheckpointError, match=re.escape(path.name.rstrip("\0"))):
            open_checkpoint(path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pkl", "training_args.bin"]
)
def test_pickles_are_never_run(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists(), "the bomb is a dud"
    marker.unlink()

    only_pickle = tmp_path / "only"
    only_pickle.mkdir()
    (only_pickle / "config.json").write_text(json.dumps(config()))
    (only_pickle / name).write_bytes(bomb)
    read = name == "pytorch_model.bin"
    assert (name if read else "*.safetensors") in refusal(only_pickle)

    beside = write_model(tmp_path / "beside", config())
    (beside / name).write_bytes(bomb)
    assert list(all_faults(open_checkpoint(beside))) == []

    disguised = write_model(tmp_path / "disguised", config())
    (disguised / "model.safetensors").write_bytes(bomb)
    assert "model.safetensors" in refusal(disguised)
    assert not marker.exists()


# ---- which files are read -------------------------------------------------------------------


def test_shards_beside_the_index_are_not_read_as_vllm_does_not(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"whatever")
    assert list(faults(open_checkpoint(tmp_path))) == []


@pytest.mark.parametrize(
    ("shards", "file", "contents", "named"),
    [
        (2, "model.safetensors", shard_bytes(tensors_of(config())), "model.safetensors: "),
        (2, "adapter_config.json", b"{}", "adapter_config.json"),
        # Without an index, every file counts, as for vLLM.
        (1, "extra.safetensors", shard_bytes({"extra": ("BF16", (2, 2))}), "safetensors: extra: "),
    ],
)
def test_files_that_do_not_belong_to_a_model_are_refused(
    shards: int, file: str, contents: bytes, named: str, tmp_path: Path
) -> None:
    write_model(tmp_path, config(), shards=shards)
    (tmp_path / file).write_bytes(contents)
    assert f"{tmp_path}/" in (said := refusal(tmp_path))
    assert named in said


# ---- the shards ------------------------------------------------------------------------------


ONE = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'


def with_offsets(*entries: tuple[str, list[Any], int, int], data: int = 4) -> bytes:
    """A shard with F32 tensors (name, shape, start, end) and `data` bytes of data."""
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for name, shape, start, end in entries
    }
    return framed(json.dumps(header).encode()) + bytes(data)


WHOLE = shard_bytes(tensors_of(config()))
BROKEN = {
    "empty": b"",
    "a header of 100 MB": (100 << 20).to_bytes(8, "little") + b"{}",
    "a header beyond the end": (64).to_bytes(8, "little") + b"{}",
    "a list for a header": framed(b"[]"),
    "overlapping tensors": with_offsets(("a", [1], 0, 4), ("b", [1], 0, 4)),
    "a gap": with_offsets(("a", [1], 4, 8), data=8),
    "data beyond the end": with_offsets(("a", [2], 0, 8)),
    "a negative shape": with_offsets(("a", [-1], 0, 4)),
    "a shape that overflows": with_offsets(("a", [2**62, 4], 0, 4)),
    "an unknown dtype": framed(b"{" + ONE.replace(b"F32", b"F31") + b"}") + bytes(4),
    "a name twice": framed(b"{" + ONE + b"," + ONE + b"}") + bytes(4),
    "cut off": WHOLE[: len(WHOLE) // 2],
    "one byte short": WHOLE[:-1],
    "one byte long": WHOLE + b"\0",
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_shard_is_named(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "model.safetensors").write_bytes(BROKEN[case])
    assert f"{tmp_path / 'model.safetensors'}: " in refusal(tmp_path)


# ---- the index -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..",
     "..\\model.safetensors", "model\0.safetensors", "\x1b[2J.safetensors", "pytorch_model.bin",
     "", None, 7, ["model-00001-of-00002.safetensors"]],
)  # fmt: skip
def test_an_index_leads_to_no_file_outside(file: Any, tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    write_index(tmp_path, read_index(tmp_path) | {DOWN: file})
    said = refusal(tmp_path)
    assert INDEX_FILE in said
    assert DOWN in said
    assert said.isprintable()


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_without_files_is_named(weight_map: Any, tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    write_index(tmp_path, weight_map)
    assert f"{INDEX_FILE}: weight_map" in refusal(tmp_path)


def test_an_index_lists_what_its_shards_hold(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    files = read_index(tmp_path)
    other = next(file for file in files.values() if file != files[DOWN])
    write_index(tmp_path, files | {DOWN: other})
    assert DOWN in (said := refusal(tmp_path))
    assert other in said
    write_index(tmp_path, {name: file for name, file in files.items() if name != DOWN})
    assert DOWN in (said := refusal(tmp_path))
    assert INDEX_FILE in said
    write_index(tmp_path, files)
    (tmp_path / other).unlink()
    assert f"{tmp_path / other}: " in (said := refusal(tmp_path))
    assert INDEX_FILE in said


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    again = shard_bytes({DOWN: tensors_of(config())[DOWN]})
    (tmp_path / "again.safetensors").write_bytes(again)
    assert DOWN in (said := refusal(tmp_path))
    assert "again.safetensors" in said


def test_a_model_may_have_as_many_experts_as_qwen3_235b(tmp_path: Path) -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1}
    shape = {"num_hidden_layers": 94, "hidden_size": 4, "model_type": "qwen3_moe"}
    raw = config(**experts, **shape, architectures=["Qwen3MoeForCausalLM"])
    write_model(tmp_path, raw, shards=2)
    assert len(open_checkpoint(tmp_path).tensors) == 36_945


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", INDEX_FILE])
def test_special_files_and_broken_links_are_refused(file: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", config())
    for make in (
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("gone"),
        lambda path: path.symlink_to(path.name),
    ):
        (model / file).unlink(missing_ok=True)
        make(model / file)
        assert str(model / file) in refusal(model)
        (model / file).rmdir() if (model / file).is_dir() else (model / file).unlink()
