"""Which files of a directory are read. Files that are refused are in tests/hostile."""

import json
import pickle
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.pickles.bombs import Bomb
from tests.support.model_files import (
    config,
    gac_config,
    refusal,
    shard_bytes,
    tensors_of,
    write_model,
)
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.errors import CheckpointError


def test_what_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for path in (tmp_path / "nowhere", tmp_path / "model.bin", Path("org/model\0")):
        with pytest.raises(CheckpointError, match=r"not a directory|no such directory"):
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
    expected = "is not a file that torch.save wrote" if read else "no *.safetensors files and no"
    assert expected in refusal(only_pickle)

    beside = write_model(tmp_path / "beside", config())
    (beside / name).write_bytes(bomb)
    assert list(faults(open_checkpoint(beside), finite=True)) == []

    disguised = write_model(tmp_path / "disguised", config())
    (disguised / "model.safetensors").write_bytes(bomb)
    assert "model.safetensors: not a readable safetensors file" in refusal(disguised)
    assert not marker.exists()


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

    local = tmp_path / "local"
    local.mkdir()
    for file in snapshot.iterdir():
        (local / file.name).symlink_to(file.resolve())
    assert list(faults(open_checkpoint(local))) == []


def test_other_links_out_of_the_directory_are_refused_with_a_way_round(tmp_path: Path) -> None:
    model, linked = write_model(tmp_path / "blobs", config()), tmp_path / "all links"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    said = refusal(linked)
    assert "outside the model directory" in said
    _, _, copy = said.partition("copy the files themselves: ")
    subprocess.run(["sh", "-c", copy], cwd=tmp_path, check=True)
    assert list(faults(open_checkpoint(tmp_path / "COPY"))) == []


# ---- which files are read -------------------------------------------------------------------


def test_shards_beside_the_index_are_not_read_as_vllm_does_not(tmp_path: Path) -> None:
    write_model(tmp_path, config(), shards=2)
    (tmp_path / "consolidated.safetensors").write_bytes(b"whatever")
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_without_an_index_every_safetensors_file_counts_as_for_vllm(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "extra.safetensors").write_bytes(shard_bytes({"extra": ("BF16", (2, 2))}))
    assert "extra.safetensors: extra: not part of the model" in refusal(tmp_path)


# ---- the shards ------------------------------------------------------------------------------


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
