"""Files of torch.save, damaged by hand or at random. Each is refused in one sentence."""

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.pickles import foreign
from tests.checkpoint.pickles.archives import ints, legacy_file, program, storage, tensor, zip_file
from tests.checkpoint.pickles.test_torch_file import FORMATS, refusal
from vllm_gac.checkpoint.open import faults
from vllm_gac.checkpoint.pickles import zip_archive
from vllm_gac.checkpoint.pickles.torch_file import open_torch_file
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import llm_pruner, svd_llm
from vllm_gac.importers.pickled_companions import pickled_companions
from vllm_gac.importers.pickled_model import open_pickled_model

GOOD = tensor(storage(), 0, ints(4), ints(1))
WHOLE = zip_file(GOOD, {"0": bytes(16), "1": b""})


def test_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    for data in (zip_file(GOOD, {"0": bytes(16)}), legacy_file(GOOD, {"0": (4, bytes(16))})):
        (tmp_path / "whole.pt").write_bytes(data)
        assert open_torch_file(tmp_path / "whole.pt").root.shape == (4,)
        for end in range(len(data)):
            refusal(tmp_path / "t.pt", data[:end])


def entry(data: bytes, at: int, value: bytes) -> bytes:
    """`data` with another value in a field of the first entry of the central directory."""
    start = data.index(b"PK\x01\x02") + at
    return data[:start] + value + data[start + len(value) :]


def compressed() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", GOOD)
    return out.getvalue()


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (
        lambda data: compressed(),
        "is not a zip file that torch.save wrote: archive/data.pkl is compressed or encrypted",
    ),
    "encrypted": (
        lambda data: entry(data, 8, b"\x01\x00"),
        "is not a zip file that torch.save wrote: archive/data.pkl is compressed or encrypted",
    ),
    "appended to": (lambda data: data + b"x", "is cut off: the end of the zip file is not at its"),
    "a member beyond the end": (
        lambda data: entry(data, 20, struct.pack("<2L", 1 << 20, 1 << 20)),
        "is cut off or damaged: archive/data.pkl reaches beyond the end of the data",
    ),
    "a member longer than it is": (
        lambda data: entry(data, 20, struct.pack("<2L", len(GOOD) + 40, len(GOOD) + 40)),
        "is not a zip file that torch.save wrote: archive/byteorder overlaps another",
    ),
    "a header somewhere else": (
        lambda data: entry(data, 42, struct.pack("<L", 3)),
        "is damaged: archive/data.pkl is not where the zip directory says",
    ),
    "a header at the end of the world": (
        lambda data: entry(data, 42, struct.pack("<L", 0xFFFFFFFE)),
        "is cut off: what its zip directory names is not there",
    ),
    "the same name twice": (
        lambda data: data.replace(b"data/1", b"data/0"),
        "is not a zip file that torch.save wrote: archive/data/0 is in it twice",
    ),
    "more members than there are": (
        lambda data: data[:-14] + struct.pack("<2H", 99, 99) + data[-10:],
        "is damaged: its zip directory is incomplete",
    ),
    "too many members": (
        lambda data: data[:-14] + struct.pack("<2H", 60_000, 60_000) + data[-10:],
        "has 60000 members, at most 20000 are read",
    ),
    "big-endian": (
        lambda data: data.replace(b"little", b"biggie"),
        "was written on a big-endian machine",
    ),
    "no pickle in it": (
        lambda data: data.replace(b"data.pkl", b"data.txt"),
        "is a zip file, but not one that torch.save wrote",
    ),
    "a TorchScript archive": (
        lambda data: zip_file(GOOD, {"0": bytes(16)}, **{"constants.pkl": b""}),
        "is a zip file, but not one that torch.save wrote",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_zip_file(damage: str, tmp_path: Path) -> None:
    change, said = DAMAGED[damage]
    assert refusal(tmp_path / "t.pt", change(WHOLE)).startswith(said)


def test_a_zip_file_of_zip64_records_is_read(tmp_path: Path) -> None:
    torch.save(torch.arange(4), tmp_path / "t.pt")
    data = (tmp_path / "t.pt").read_bytes()
    assert b"PK\x06\x06" in data  # torch always writes them
    with zipfile.ZipFile(tmp_path / "t.pt") as archive:
        expected = {member.filename: member.file_size for member in archive.infolist()}
    with (tmp_path / "t.pt").open("rb") as file:
        members = zip_archive.read_members(file, len(data))
    assert {name: member.size for name, member in members.items()} == expected


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a file that torch.save wrote"),
        (b"\x80\x02N.", "is not a file that torch.save wrote"),
        (b"PK\x03\x04", "is cut off: there is no end of a zip file"),
        (b'{"model": 1}', "is not a file that torch.save wrote"),
        (legacy_file(GOOD, {"0": (5, bytes(20)), "1": (0, b"")}), "is damaged: nothing refers"),
        (legacy_file(GOOD, {"0": (3, bytes(12))}), "is cut off or damaged: storage '0' of 4"),
        (legacy_file(GOOD, {"0": (1 << 62, b"")}), "is cut off: the storage '0' is not there"),
        (legacy_file(GOOD), "refers to the storage '0', which is not in the file"),
    ],
)
def test_a_damaged_file_of_another_kind(data: bytes, said: str, tmp_path: Path) -> None:
    assert refusal(tmp_path / "t.pt", data).startswith(said)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "not a regular file"), (tmp_path / "no", "No such file")):
        with pytest.raises(CheckpointError, match=said):
            open_torch_file(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_torch_file(tmp_path / "pipe")


def test_a_file_that_changes_after_it_was_scanned(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    path.write_bytes(zip_file(GOOD, {"0": bytes(16)}))
    file = open_torch_file(path)
    with file.reader() as read:
        os.truncate(path, 200)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            read(file.root)
    with pytest.raises(CheckpointError, match="has changed while it was read"), file.reader():
        pass


# ---- random damage ---------------------------------------------------------------------------


def said_of(path: Path, read: Callable[[Path], object]) -> str:
    """The message that refuses `path`, or "" if it is read. Any other exception is a failure."""
    try:
        read(path)
    except CheckpointError as e:
        return str(e)
    return ""


def import_whole(path: Path) -> None:
    """Do all that `vllm-gac import` does except writing."""
    pickled = open_pickled_model(path)
    pickled_companions(pickled)
    model = (svd_llm if svd_llm.wrote(pickled) else llm_pruner).read(pickled)
    for fault in faults(model, finite=True):
        raise CheckpointError(fault)
    with model.reader() as read:
        for name in model.layout.tensors():
            read(name)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small complete model in each format."""
    path = tmp_path_factory.mktemp("good") / "m.pt"
    model = foreign.model(
        foreign.TRANSFORMERS_LLAMA,
        foreign.llama_config(),
        [foreign.dims(ratio=0.5, whole=("q", "o"))],
        attention=foreign.at(foreign.SVD_LLAMA, foreign.Attention, "SVD_LlamaAttention"),
        mlp=foreign.at(foreign.SVD_LLAMA, foreign.Mlp, "SVD_LlamaMLP"),
        rotary=foreign.at(foreign.SVD_LLAMA, foreign.LlamaRotaryEmbedding),
    )
    files = {}
    for key, options in FORMATS.items():
        foreign.save(path, {"model": model, "tokenizer": foreign.tokenizer("p")}, **options)
        import_whole(path)
        files[key] = path.read_bytes()
    return files


@settings(max_examples=300)
@given(data=st.data())
def test_no_mutation_of_a_good_file_does_anything_but_fail_in_words(
    good: dict[str, bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changed = bytearray(good[data.draw(st.sampled_from(sorted(good)))])
    for _ in range(data.draw(st.integers(1, 6))):
        # The pickle comes first. Damage there has the most effect.
        end = data.draw(st.sampled_from([8000, len(changed)]))
        at = data.draw(st.integers(0, min(end, len(changed)) - 1))
        piece = data.draw(st.binary(max_size=8))
        cut = data.draw(st.sampled_from([0, len(piece), 1, 30]))
        changed[at : at + cut] = piece
    path = tmp_path_factory.getbasetemp() / "mutated.pt"
    path.write_bytes(changed)
    said = said_of(path, import_whole)
    assert not said or said.startswith(str(path.parent))


@settings(max_examples=300)
@given(st.lists(st.sampled_from([bytes([code]) for code in range(256)]), max_size=60))
def test_no_program_does_anything_but_fail_in_words(
    tmp_path_factory: pytest.TempPathFactory, opcodes: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "program.pt"
    path.write_bytes(zip_file(program(b"".join(opcodes), 4)))
    said = said_of(path, open_torch_file)
    assert not said or said.startswith(f"{path}: ")
