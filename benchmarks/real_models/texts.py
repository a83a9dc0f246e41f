"""Code and English prose of the packages that are installed, split by package.

Whole packages go to calibration, to healing or to what is held out, so that no text of a package
that a model is measured on was read before. texts.json names them with their versions: whoever
installs the same ones has the same texts. Python's own library is always held out.
"""

import contextlib
import gzip
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.real_models.overlap import Overlap

Packages: TypeAlias = Sequence[tuple[str, Distribution]]

SPLITS = ("calibration", "healing", "held-out")
_SHARES = {"calibration": 0.2, "healing": 0.5, "held-out": 0.3}
LIBRARY = "python"
# Characters. Long files are cut, and what one package may have of a split is limited, so that a
# text is of many packages from its beginning.
_MOST, _LEAST = 12_000, 400
_SHARE_OF_A_PACKAGE = 0.05
CHARACTERS = {"calibration": 8_000_000, "healing": 24_000_000, "held-out": 4_000_000}
_LEFT_OUT = re.compile(r"(^|/)(tests?|testing|_vendor|vendor|vendored|node_modules)/|(^|/)test_")


def write_texts(out: Path, problems: Path, scale: float = 1.0) -> None:
    """Write `out`/KIND-SPLIT.jsonl.gz for every kind and split, and `out`/texts.json.

    Documents that share a run of words with HumanEval are left out.

    Args:
        out: The directory.
        problems: HumanEval.jsonl.gz.
        scale: What CHARACTERS are multiplied by.
    """
    out.mkdir(parents=True, exist_ok=True)
    overlap = Overlap(problems)
    files = sorted(
        {name.lower(): d for d in distributions() if (name := d.metadata["Name"])}.items()
    )
    about: dict[str, Any] = {"python": sysconfig.get_python_version(), "texts": {}}
    for split in SPLITS:
        packages = [(name, d) for name, d in files if _split(name) == split]
        for kind, source in (("code", _code), ("prose", _prose)):
            limit = int(scale * CHARACTERS[split])
            records, dropped = _shuffled(source(packages, split), limit, overlap)
            name = f"{kind}-{split}.jsonl.gz"
            write_records(out / name, records)
            versions = {name: d.version for name, d in packages} | {LIBRARY: about["python"]}
            about["texts"][name] = {
                "documents": len(records),
                "characters": sum(len(record["text"]) for record in records),
                "overlap_dropped": dropped,
                "packages": {p: versions[p] for p in sorted({r["package"] for r in records})},
            }
    (out / "texts.json").write_text(json.dumps(about, indent=1) + "\n")


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write a file of JSON lines, gzipped; the same records make the same bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        for record in records:
            packed.write((json.dumps(record) + "\n").encode())


def _split(package: str) -> str:
    at = int.from_bytes(hashlib.sha256(package.encode()).digest()[:4]) / 2**32
    for split, share in _SHARES.items():
        if (at := at - share) < 0:
            return split
    return SPLITS[-1]


def _shuffled(
    source: Iterator[tuple[str, Iterable[str]]], limit: int, overlap: Overlap
) -> tuple[list[dict[str, Any]], int]:
    """Records of at most `limit` characters in all, in random order, and how many were dropped."""
    records, dropped = [], 0
    for package, documents in source:
        left = limit * _SHARE_OF_A_PACKAGE
        for document in documents:
            if (left := left - len(document)) < 0:
                break
            if overlap.found_in(document):
                dropped += 1
            else:
                records.append({"package": package, "text": document})
    random.Random(0).shuffle(records)
    whole, kept = 0, []
    for record in records:
        if (whole := whole + len(record["text"])) > limit:
            break
        kept.append(record)
    return kept, dropped


def _code(packages: Packages, split: str) -> Iterator[tuple[str, Iterable[str]]]:
    """The beginning of each file of each package that is not a test."""
    if split == "held-out":
        library = Path(sysconfig.get_path("stdlib"))
        files = (path for path in library.rglob("*.py") if "site-packages" not in path.parts)
        yield LIBRARY, _read({f"{path.relative_to(library)}": path for path in files})
    for name, package in packages:
        yield name, _read(_files(package))


def _prose(packages: Packages, split: str) -> Iterator[tuple[str, Iterable[str]]]:
    """What packages say of themselves and in docstrings, without code, tables and links."""
    for name, package in packages:
        description = package.metadata.get_payload() or package.metadata["Description"] or ""
        about = _paragraphs(re.sub(r"```.*?```", "", f"{description}", flags=re.S))
        docstrings = (
            _paragraphs("\n\n".join(re.findall(r'"""(.*?)"""', text, re.S)))
            for text in _read(_files(package))
        )
        yield name, (text for text in chain([about], docstrings) if len(text) >= _LEAST)


def _files(package: Distribution) -> dict[str, Path]:
    sources = (file for file in package.files or () if file.suffix == ".py")
    return {f"{file}": Path(f"{file.locate()}") for file in sources}


def _read(files: dict[str, Path]) -> Iterator[str]:
    names = sorted(name for name in files if not _LEFT_OUT.search(name))
    random.Random(0).shuffle(names)
    for name in names:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = files[name].read_text(encoding="utf-8")[:_MOST]
            if len(text) >= _LEAST:
                yield text


def _paragraphs(text: str) -> str:
    """The paragraphs of `text` that are sentences, each once."""
    paragraphs = (re.sub(r"\s*\n\s*", "\n", part.strip()) for part in text.split("\n\n"))
    return "\n\n".join(dict.fromkeys(part for part in paragraphs if _is_prose(part)))[:_MOST]


def _is_prose(paragraph: str) -> bool:
    words = re.findall(r"[a-z]+(?=[ ,.;:\n)]|$)", paragraph)
    letters = sum(map(str.isalpha, paragraph)) + paragraph.count(" ")
    return len(words) >= 12 and letters > 0.85 * len(paragraph) and "://" not in paragraph
