"""Which files of a directory are read, and that a broken or hostile one is refused by its name."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model_files import (
    config,
    framed,
    gac_config,
    read_index,
    refusal,
    shard_bytes,
    tensors_of,
    write_index,
    write_model,
)
from vllm_gac.checkpoint import faults, open_checkpoint
from vllm_gac.errors import CheckpointError

DOWN = "model.layers.0.mlp.down_proj.weight"


def test_what_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for path in (tmp_path / "nowhere", tmp_path / "model.bin", Path("org/model\0")):
        with pytest.raises(CheckpointError, match="not a directory"):
            open_checkpoint(path)


def test_no_config(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "config.json").unlink()
    assert "config.json: cannot be read (No such file or directory)" in refusal(tmp_path)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "dangling link"])
def test_a_file_that_is_none_is_refused(file: str, kind: str, tmp_path: Path) -> None:
    path = write_model(tmp_path, config()) / file
    path.unlink(missing_ok=True)
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling link":
            path.symlink_to(tmp_path / "gone")
    assert str(path) in refusal(tmp_path)


class Bomb:
    """Leaves a marker file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pkl", "training_args.bin"]
)
def test_pickles_are_never_opened(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists(), "the bomb is a dud"
    marker.unlink()

    only_pickle = tmp_path / "only"
    only_pickle.mkdir()
    (only_pickle / "config.json").write_text(json.dumps(config()))
    (only_pickle / name).write_bytes(bomb)
    assert "pickles (.bin, .pt) are never opened" in refusal(only_pickle)

    beside = write_model(tmp_path / "beside", config())
    (beside / name).write_bytes(bomb)
    assert list(faults(open_checkpoint(beside), finite=True)) == []

    disguised = write_model(tmp_path / "disguised", config())
    (disguised / "model.safetensors").write_bytes(bomb)
    assert "model.safetensors: not a readable safetensors file" in refusal(disguised)
    assert not marker.exists()


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_link_out_of_the_directory_is_refused(file: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", config())
    if file.endswith("index.json"):
        write_index(directory, dict.fromkeys(tensors_of(config()), "model.safetensors"))
    outside = tmp_path / "outside"
    (directory / file).rename(outside)
    (directory / file).symlink_to(outside)
    assert f"{directory / file}: links to {outside}, outside the model directory" in refusal(
        directory
    )


def test_links_within_the_directory_and_into_a_hugging_face_cache_are_followed(
    tmp_path: Path,
) -> None:
    inside = write_model(tmp_path / "inside", config())
    (inside / "model.safetensors").rename(inside / "weights")
    (inside / "model.safetensors").symlink_to("weights")
    assert list(faults(open_checkpoint(inside))) == []

    snapshot = write_model(tmp_path / "models--org--name" / "snapshots" / "0123", config())
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert list(faults(open_checkpoint(snapshot))) == []


# ---- the index -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "model\0.safetensors",
        "model\n.safetensors",
        "\ud800.safetensors",
        "pytorch_model.bin",
        "",
        "..",
        None,
        7,
        ["model-00001-of-00002.safetensors"],
    ],
)
def test_an_index_that_names_no_shard_of_the_directory_is_refused(
    file: Any, tmp_path: Path
) -> None:
    write_model(tmp_path, config(), shards=2)
    write_index(tmp_path, read_index(tmp_path) | {DOWN: file})
    sentence = refusal(tmp_path)
    assert f"index.json: {DOWN}: " in sentence
    assert "not the name of a .safetensors file" in sentence


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors", 1])
def test_an_index_without_a_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    write_index(tmp_path, weight_map)
    assert "index.json: weight_map is missing, empty or not an object" in refusal(tmp_path)


def test_an_index_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    twice = f'"weight_map": {{"{DOWN}": "a.safetensors", '
    path.write_text(path.read_text().replace('"weight_map": {', twice))
    assert f"'{DOWN}' appears twice" in refusal(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors: cannot be read (No such file" in refusal(tmp_path)


def test_a_tensor_in_another_shard_than_listed_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    weight_map = read_index(tmp_path)
    other = next(file for file in weight_map.values() if file != weight_map[DOWN])
    write_index(tmp_path, weight_map | {DOWN: other})
    assert f"index.json: {DOWN} is not in {other}" in refusal(tmp_path)


def test_a_tensor_that_is_listed_and_in_no_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config(), lambda tensors: tensors.pop(DOWN), shards=2)
    write_index(tmp_path, read_index(tmp_path) | {DOWN: "model-00001-of-00002.safetensors"})
    assert f"{DOWN} is not in model-00001-of-00002.safetensors" in refusal(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    weight_map = read_index(tmp_path)
    file = weight_map.pop(DOWN)
    write_index(tmp_path, weight_map)
    assert f"{file}: {DOWN} is not listed" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    part = {DOWN: tensors_of(config())[DOWN]}
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(shard_bytes(part))
    weight_map = read_index(tmp_path)
    write_index(tmp_path, weight_map | {"extra": "model-00003-of-00003.safetensors"})
    assert f"{DOWN} is also in {weight_map[DOWN]}" in refusal(tmp_path)


def test_shards_beside_the_index_are_not_read_as_vllm_does_not(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"whatever")
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_without_an_index_every_safetensors_file_counts_as_for_vllm(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "extra.safetensors").write_bytes(shard_bytes({"extra": ("BF16", (2, 2))}))
    assert "extra.safetensors: extra: not part of the model" in refusal(tmp_path)


# ---- the shards ------------------------------------------------------------------------------


def test_a_shard_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = (write_model(tmp_path, gac_config()) / "model.safetensors").read_bytes()
    for sixteenth in range(16):
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) * sixteenth // 16])
        assert "model.safetensors: not a readable safetensors file" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole + b"\0")
    assert "model.safetensors: not a readable safetensors file" in refusal(tmp_path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_header_is_refused_or_harmless(
    position: float, bit: int, tmp_path: Path
) -> None:
    whole = bytearray(shard_bytes(tensors_of(gac_config())))
    whole[int(position * (8 + int.from_bytes(whole[:8], "little")))] ^= 1 << bit
    write_model(tmp_path, gac_config())
    (tmp_path / "model.safetensors").write_bytes(whole)
    try:
        found = list(faults(open_checkpoint(tmp_path)))
    except CheckpointError as e:
        found = [str(e)]
    assert all(str(tmp_path) in fault for fault in found)


def with_offsets(*entries: tuple[str, list[Any], int, int], data: int = 4) -> bytes:
    """A shard of F32 tensors (name, shape, start, end) and `data` bytes."""
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for name, shape, start, end in entries
    }
    return framed(json.dumps(header).encode()) + bytes(data)


ONE = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
BAD_HEADERS = {
    "no bytes": b"",
    "seven bytes": b"\0" * 7,
    "length 2**63": struct.pack("<Q", 2**63) + b"{}",
    "length 100 MB": struct.pack("<Q", 100_000_000) + b"{}",
    "length 5 MB, and so it is": framed(b"{" + ONE + b" " * (5 << 20) + b"}") + bytes(4),
    "length beyond the end": struct.pack("<Q", 64) + b"{}",
    "a list": framed(b"[]"),
    "deep nesting": framed(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "overlap": with_offsets(("a", [1], 0, 4), ("b", [1], 0, 4)),
    "hole": with_offsets(("a", [1], 4, 8), data=8),
    "beyond the end": with_offsets(("a", [2], 0, 8)),
    "negative shape": with_offsets(("a", [-1], 0, 4)),
    "shape 1.0": with_offsets(("a", [1.0], 0, 4)),
    "shape overflow": with_offsets(("a", [2**62, 4], 0, 4)),
    "offsets reversed": with_offsets(("a", [1], 4, 0)),
    "unknown dtype": framed(b"{" + ONE.replace(b"F32", b"F31") + b"}") + bytes(4),
    "a name twice": framed(b"{" + ONE + b"," + ONE + b"}") + bytes(4),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header_is_refused_naming_the_file(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "model.safetensors").write_bytes(BAD_HEADERS[case])
    assert str(tmp_path / "model.safetensors") in refusal(tmp_path)
