"""Make a corpus of Python's standard library: select modules, drop duplicates, make splits.

`python -m tools.demo_model.corpus pack OUT.tar.xz` packs this interpreter's library for a machine
that lacks its sources; `... excerpts DIR` writes the calibration and held-out texts of the demo.
"""

import argparse
import hashlib
import io
import platform
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_gac.errors import GacError

Split = Literal["train", "validation", "heldout"]

# These are not code (character tables, help topics), not the standard library, or different on
# another machine. Files with invalid syntax exist to test the compiler.
_EXCLUDED_PREFIXES = (
    "site-packages/",
    "dist-packages/",
    "config-",
    "_sysconfigdata",
    "encodings/",
    "pydoc_data/",
    "html/entities.py",
    "lib2to3/tests/data/",
)
_EXCLUDED_PART = "badsyntax"
_MIN_SIZE = 400  # characters; smaller modules are package markers and stubs

# Sizes of splits, in thousandths of all modules.
_HELD_OUT, _VALIDATION = 14, 24
# Larger modules are always in the training split, so that none makes up most of a small split.
_MAX_HELD_OUT = 32_000
_CALIBRATION_SIZE = 350_000
_MAX_CALIBRATION = 24_000


@dataclass(frozen=True, slots=True)
class Document:
    """One module: its path below the library's directory ("asyncio/queues.py") and its source."""

    path: str
    source: str

    @property
    def text(self) -> str:
        """The training text: the source, below a comment with its path."""
        return f"# Lib/{self.path}\n{self.source}"

    @property
    def split(self) -> Split:
        """The split of the document. It depends only on the path, unless the module is large."""
        return "train" if len(self.source) > _MAX_HELD_OUT else split_of(self.path)


@dataclass(frozen=True, slots=True)
class Corpus:
    """A library's modules, in the order of their paths."""

    name: str
    documents: tuple[Document, ...]

    def split(self, split: Split) -> list[Document]:
        """The documents of one split."""
        return [document for document in self.documents if document.split == split]

    @property
    def sha256(self) -> str:
        """Digest of all documents. Corpora with the same digest train the same model."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.path}\0{document.source}\0".encode())
        return digest.hexdigest()


def read_corpus(source: Path | None = None) -> Corpus:
    """Read the modules of `source`, a library directory or a packed one.

    The default is this interpreter's library. Raises GacError if `source` is neither of them, or
    holds too few modules to be a standard library.
    """
    if source is None:
        source, name = Path(sysconfig.get_path("stdlib")), f"python-{platform.python_version()}"
    else:
        name = source.name.removesuffix(".tar.xz")
    if source.is_dir():
        files = _files_below(source)
    elif source.is_file():
        files = _files_in_archive(source)
    else:
        raise GacError(f"{source}: no such corpus; give a library directory or a packed .tar.xz")
    documents = tuple(deduplicated(documents_of(files)))
    if len(documents) < 100:
        raise GacError(
            f"{source}: {len(documents)} usable Python modules, which is no standard library; this "
            "interpreter may lack its sources, then pack those of another one with "
            "`python -m tools.demo_model.corpus pack FILE.tar.xz` and pass that file"
        )
    return Corpus(name, documents)


def split_of(path: str) -> Split:
    """The split that a module path hashes to."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % 1000
    if bucket < _HELD_OUT:
        return "heldout"
    return "validation" if bucket < _HELD_OUT + _VALIDATION else "train"


def _files_below(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*.py")):
        if _is_wanted(path.relative_to(directory).as_posix()):
            yield path.relative_to(directory).as_posix(), path.read_bytes()


def _files_in_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, "r:xz") as members:
            for member in members:
                stream = members.extractfile(member) if _is_wanted(member.name) else None
                if stream is not None:
                    yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError) as e:
        raise GacError(f"{archive}: not a readable .tar.xz of Python sources ({e})") from e


def _is_wanted(path: str) -> bool:
    return (
        path.endswith(".py")
        and not path.startswith(_EXCLUDED_PREFIXES)
        and _EXCLUDED_PART not in path
    )


def documents_of(files: Iterable[tuple[str, bytes]]) -> Iterator[Document]:
    """The documents of (path, content), in the order of their paths, but for the smallest."""
    for path, content in sorted(files):
        try:
            source = content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # modules that test other source encodings
        source = source.replace("\r\n", "\n").strip("\n") + "\n"
        if len(source) >= _MIN_SIZE:
            yield Document(path, source)


def deduplicated(documents: Iterable[Document]) -> Iterator[Document]:
    """Skip a module if most of its lines are in earlier modules, e.g. a test's asyncio twin."""
    seen: set[str] = set()
    for document in documents:
        lines = {line.strip() for line in document.source.splitlines()}
        lines = {line for line in lines if len(line) >= 20}  # many modules share shorter lines
        if len(lines & seen) <= 0.6 * len(lines):
            yield document
        seen |= lines


def excerpts(corpus: Corpus) -> tuple[str, str]:
    """The calibration text, from the training split, and the held-out text, all of its split."""
    by_hash = sorted(
        corpus.split("train"), key=lambda d: hashlib.sha256(d.path.encode()).digest(), reverse=True
    )
    calibration, size = [], 0
    for document in by_hash:
        if len(document.source) <= _MAX_CALIBRATION and size < _CALIBRATION_SIZE:
            calibration.append(document)
            size += len(document.text)
    return join(calibration), join(corpus.split("heldout"))


def join(documents: Iterable[Document]) -> str:
    """Join documents into one text, in the format of the shipped files."""
    return "\n\n".join(document.text for document in documents)


def pack(archive: Path, library: Path | None = None) -> int:
    """Pack `library` into `archive` (.tar.xz). The default is this interpreter's library.

    Returns the number of modules.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    count = 0
    with tarfile.open(archive, "w:xz") as members:
        for path, content in _files_below(library):
            member = tarfile.TarInfo(path)  # without owner and time: the archive is reproducible
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
            count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.corpus", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="pack this interpreter's library")
    packing.add_argument("archive", type=Path)
    excerpting = verbs.add_parser("excerpts", help="write calibration.txt and heldout.txt")
    excerpting.add_argument("directory", type=Path)
    excerpting.add_argument("--corpus", type=Path, help="library directory or .tar.xz")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "pack":
            print(f"{options.archive}: {pack(options.archive)} modules")
        else:
            calibration, held_out = excerpts(read_corpus(options.corpus))
            (options.directory / "calibration.txt").write_text(calibration, encoding="utf-8")
            (options.directory / "heldout.txt").write_text(held_out, encoding="utf-8")
    except (GacError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
