"""The corpus: its splits, duplicates and packing. The shipped texts come from the right splits."""

import platform
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model.corpus import Corpus, Document, excerpts, main, pack, read_corpus, split_of
from vllm_gac.demo import CALIBRATION, HELD_OUT
from vllm_gac.errors import GacError


def module(index: int) -> str:
    return "".join(f"def function_{index}_{line}(argument): return {line}\n" for line in range(20))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    directory = tmp_path / "library"
    for index in range(300):
        path = directory / f"package_{index % 7}" / f"module_{index}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module(index))
    return directory


def modules_of(text: str) -> list[str]:
    return re.findall(r"^# Lib/(\S+\.py)$", text, re.MULTILINE)


def test_calibration_text_is_training_split_and_held_out_text_held_out_split() -> None:
    calibration = modules_of(CALIBRATION.read_text(encoding="utf-8"))
    held_out = modules_of(HELD_OUT.read_text(encoding="utf-8"))
    assert len(calibration) > 20
    assert len(held_out) > 20
    assert {split_of(path) for path in calibration} == {"train"}
    assert {split_of(path) for path in held_out} == {"heldout"}


def test_shipped_texts_share_few_lines() -> None:
    def lines(path: Path) -> set[str]:
        stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        return {line for line in stripped if len(line) >= 20}

    held_out = lines(HELD_OUT)
    assert len(held_out & lines(CALIBRATION)) < 0.05 * len(held_out)


@given(st.text(min_size=1))
def test_the_split_depends_on_the_path_alone(path: str) -> None:
    assert Document(path, "a").split == Document(path, "b").split == split_of(path)


def test_a_very_large_module_always_trains() -> None:
    path = next(f"m{i}.py" for i in range(10_000) if split_of(f"m{i}.py") == "heldout")
    assert Document(path, "x").split == "heldout"
    assert Document(path, "x" * 100_000).split == "train"


def test_every_module_is_in_exactly_one_split(library: Path) -> None:
    corpus = read_corpus(library)
    parts = [corpus.split("train"), corpus.split("validation"), corpus.split("heldout")]
    assert sorted(d.path for part in parts for d in part) == [d.path for d in corpus.documents]
    assert len(corpus.documents) == 300


def test_copies_stubs_tables_and_other_encodings_are_left_out(library: Path) -> None:
    (library / "zz_copy.py").write_text(module(5) + "# one more line, and that is all\n")
    (library / "zz_stub.py").write_text("pass\n")
    (library / "zz_latin1.py").write_bytes(module(1000).encode() + b"# caf\xe9\n")
    (library / "encodings").mkdir()
    (library / "encodings" / "cp1.py").write_text(module(1001))
    (library / "site-packages").mkdir()
    (library / "site-packages" / "other.py").write_text(module(1002))
    assert len(read_corpus(library).documents) == 300


def test_a_packed_library_reads_as_the_library(library: Path, tmp_path: Path) -> None:
    archive = tmp_path / "python-0.tar.xz"
    assert pack(archive, library) == 300
    packed = read_corpus(archive)
    assert packed.name == "python-0"
    assert packed.documents == read_corpus(library).documents


def test_packing_twice_gives_the_same_bytes(library: Path, tmp_path: Path) -> None:
    pack(tmp_path / "one.tar.xz", library)
    pack(tmp_path / "other.tar.xz", library)
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "other.tar.xz").read_bytes()


def test_by_default_the_corpus_is_this_interpreters_library() -> None:
    try:
        corpus = read_corpus()
    except GacError:
        pytest.skip("this interpreter has no standard library sources")
    assert corpus.name == f"python-{platform.python_version()}"
    assert "asyncio/queues.py" in {document.path for document in corpus.documents}


def test_excerpts_are_whole_modules_of_their_splits(library: Path) -> None:
    corpus = read_corpus(library)
    calibration, held_out = excerpts(corpus)
    assert modules_of(held_out) == [d.path for d in corpus.split("heldout")]
    assert {split_of(path) for path in modules_of(calibration)} == {"train"}


def test_the_digest_tells_corpora_apart() -> None:
    one = Corpus("a", (Document("m.py", "x"),))
    assert one.sha256 == Corpus("b", (Document("m.py", "x"),)).sha256
    assert one.sha256 != Corpus("a", (Document("m.py", "y"),)).sha256


@pytest.mark.parametrize(
    ("name", "content"),
    [("missing", None), ("broken.tar.xz", b"not an archive"), ("few", "directory")],
)
def test_an_unusable_corpus_is_one_clear_error(
    name: str, content: bytes | str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / name
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content is not None:
        source.mkdir()
    assert main(["excerpts", str(tmp_path), "--corpus", str(source)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}")
    assert error.count("\n") == 1
