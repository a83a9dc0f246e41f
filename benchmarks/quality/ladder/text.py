"""Text that is at hand: Python's standard library, and the packages that are installed beside it.

Sources and documents (README files, .md, .rst, .txt, and the description that a package's metadata
has) of every package whose metadata states a permissive licence. Modules are split by a hash of
their paths, and near copies are left out, as the demo model's corpus does it. The same packages
make the same text; `sha256` of the manifest tells.

A text directory holds

train.safetensors       tokens [n], and the validation split's [m]
heldout.safetensors     windows [count, WINDOW] of held-out documents, and the document of each
calibration-N.txt       documents of the training split, other ones in each file
healing.txt             all documents of the training split, these first
heldout.txt             the documents of the windows, as text
manifest.json           packages, versions, licences, counts, hashes
"""

import hashlib
import multiprocessing
import os
import platform
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from tools.demo_model.corpus import Corpus, Document, deduplicated, documents_of, join, read_corpus
from tools.demo_model.tokenizer import token_stream
from vllm_gac import demo
from vllm_gac.checkpoint.atomic_files import appearing, write_json, write_tensors
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import GacError

# What is scored: windows of WINDOW tokens, each within one document, at most MAX_WINDOWS of it.
WINDOW, WINDOWS, MAX_WINDOWS = 1024, 256, 3
VALIDATION_TOKENS = 1 << 17
CALIBRATIONS, _CALIBRATION_CHARACTERS, _MAX_CALIBRATION = 3, 600_000, 24_000
_SUFFIXES = (".py", ".md", ".rst", ".txt")
# Larger files are tables and generated code.
_MAX_FILE = 200_000
_READERS = 16
_CHUNK_CHARACTERS = 2_000_000
_NO_TEXT = re.compile(r"(^|/)(top_level|entry_points|namespace_packages|RECORD|SOURCES)[^/]*$")
_PERMISSIVE = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla|HPND|Zlib|Unlicense)\b",
    re.IGNORECASE,
)
_NOT_PERMISSIVE = re.compile(r"\b[AL]?GPL|Proprietary|NonCommercial|LicenseRef", re.IGNORECASE)
_LICENCE_CHARACTERS = 200  # some state the whole text, which names the licences of others


def write_text_directory(
    out: Path, library: Path | None = None, packages: Sequence[str] | None = None
) -> dict[str, Any]:
    """Write the text directory `out` from what is installed. Returns the manifest.

    Args:
        out: The directory to write, which must not exist.
        library: Python's standard library, or a packed one. None: this interpreter's.
        packages: Names of the packages to read. None: all that are installed.

    Raises:
        GacError: `out` exists, or too little text is held out.
    """
    if out.exists():
        raise GacError(f"{out}: exists already; remove it or write elsewhere")
    standard = read_corpus(library)
    read = sorted(_permissive(packages), key=lambda package: package.name.lower())
    with ThreadPoolExecutor(_READERS) as pool:  # tens of thousands of small files
        contents = pool.map(_contents, read)
        files = [file for of_package in contents for file in of_package]
    found = (*standard.documents, *documents_of(files))
    corpus = Corpus("installed", tuple(deduplicated(found)))
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    held_out, document, scored = _windows(tokenizer, corpus.split("heldout"))
    train, validation = (
        _stream([d.text for d in corpus.split(split)]) for split in ("train", "validation")
    )
    manifest = {
        "sha256": corpus.sha256,
        "python": platform.python_version(),
        "standard_library": standard.name,
        "packages": {p.name: f"{p.version}, {_licence(p)}" for p in read},
        "documents": len(corpus.documents),
        "characters": sum(len(d.source) for d in corpus.documents),
        "prose_characters": sum(len(d.source) for d in corpus.documents if not _is_python(d)),
        "train_tokens": len(train),
        "validation_tokens": min(len(validation), VALIDATION_TOKENS),
        "held_out_windows": len(held_out),
        "held_out_documents": [d.path for d in scored],
    }
    with appearing(out) as partial:
        streams = {"train": train, "validation": validation[:VALIDATION_TOKENS]}
        write_tensors(partial / "train.safetensors", streams)
        windows = {"windows": held_out, "document": document}
        write_tensors(partial / "heldout.safetensors", windows)
        for name, part in _training_texts(corpus):
            (partial / name).write_text(join(part), encoding="utf-8")
        (partial / "heldout.txt").write_text(join(scored), encoding="utf-8")
        write_json(partial / "manifest.json", manifest)
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a text directory. Raises GacError if `directory` is none."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise GacError(f"{path}: missing; write the text first, with the verb `text`")
    manifest: dict[str, Any] = read_json(path)
    return manifest


def read_tensor(directory: Path, file: str, name: str) -> torch.Tensor:
    """Tensor `name` of a file of a text directory."""
    with safe_open(directory / file, "pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
    return tensor


def _permissive(names: Sequence[str] | None) -> Iterator[metadata.Distribution]:
    """Installed packages under permissive licences, the first of each name on the path."""
    seen: set[str] = set()
    for package in metadata.distributions():
        name = package.metadata["Name"]
        if not name or name.lower() in seen or (names is not None and name not in names):
            continue
        seen.add(name.lower())
        if name != "vllm-gac" and is_permissive(_licence(package)):
            yield package


def _licence(package: metadata.Distribution) -> str:
    """What the metadata states: an SPDX expression, the licence field, and classifiers."""
    about = package.metadata
    stated = about.get("License-Expression") or (about.get("License") or "")[:_LICENCE_CHARACTERS]
    classified = [
        line.rpartition("::")[2].strip()
        for line in about.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    return "; ".join(" ".join(part.split()) for part in (stated, *classified) if part)


def is_permissive(licence: str) -> bool:
    """Whether a licence, as metadata states it, names a permissive one and no other one."""
    return bool(_PERMISSIVE.search(licence)) and not _NOT_PERMISSIVE.search(licence)


def _contents(package: metadata.Distribution) -> list[tuple[str, bytes]]:
    """(path, content) of the sources and documents of a package, and of its description."""
    return list(_files(package))


def _files(package: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    for file in package.files or ():
        path = file.as_posix()
        if not path.endswith(_SUFFIXES) or path.startswith("..") or _NO_TEXT.search(path):
            continue
        place = Path(str(file.locate()))
        if place.is_file() and place.stat().st_size <= _MAX_FILE:
            yield f"site-packages/{path}", place.read_bytes()
    description = package.metadata.get_payload()
    if isinstance(description, str):
        yield f"site-packages/{package.name}.README", description.encode(errors="replace")


def _is_python(document: Document) -> bool:
    return document.path.endswith(".py")


def _stream(texts: Sequence[str]) -> torch.Tensor:
    """The token stream of `texts`, by as many processes as there are cores if they are long."""
    parts = list(chunks(texts, _CHUNK_CHARACTERS))
    if len(parts) == 1:
        return _chunk_stream(parts[0])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn, initializer=_begin) as pool:
        streams = [torch.from_numpy(ids) for ids in pool.map(_chunk_ids, parts)]
    return torch.cat(streams)


def chunks(texts: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Split `texts`, in their order, into lists of about so many characters, at least one list."""
    part: list[str] = []
    size = 0
    for text in texts:
        part.append(text)
        size += len(text)
        if size >= characters:
            yield part
            part, size = [], 0
    if part or not texts:
        yield part


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core


def _chunk_ids(texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int16]]:
    ids: np.ndarray[Any, np.dtype[np.int16]] = _chunk_stream(texts).numpy()  # pickled in one piece
    return ids


def _chunk_stream(texts: Sequence[str]) -> torch.Tensor:
    return token_stream(Tokenizer.from_file(str(demo.MODEL / "tokenizer.json")), texts)


def _windows(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> tuple[torch.Tensor, torch.Tensor, list[Document]]:
    """Windows [count, WINDOW], the index of the document of each, and those documents.

    A document gives its first windows, which begin with the begin token. In the order of a hash of
    the paths, so that no package comes first.
    """
    windows: list[torch.Tensor] = []
    document: list[int] = []
    scored: list[Document] = []
    for candidate in sorted(documents, key=_hash):
        ids = tokenizer.encode(candidate.text).ids
        count = min(len(ids) // WINDOW, MAX_WINDOWS, WINDOWS - len(windows))
        if count:
            windows += torch.tensor(ids[: count * WINDOW], dtype=torch.int16).split(WINDOW)
            document += [len(scored)] * count
            scored.append(candidate)
    if not windows:
        raise GacError(f"no held-out document has {WINDOW} tokens; install more packages")
    return torch.stack(windows), torch.tensor(document), scored


def _training_texts(corpus: Corpus) -> Iterator[tuple[str, list[Document]]]:
    """Documents of the training split by the file to write.

    No document is in two calibration texts. The text to heal on has every document, those of the
    calibration texts first.
    """
    ordered = sorted(corpus.split("train"), key=lambda d: (not _is_short(d), _hash(d)))
    left = (document for document in ordered if _is_short(document))
    for number in range(CALIBRATIONS):
        yield f"calibration-{number}.txt", _taken(left, _CALIBRATION_CHARACTERS)
    yield "healing.txt", ordered


def _is_short(document: Document) -> bool:
    return len(document.source) <= _MAX_CALIBRATION


def _taken(documents: Iterator[Document], characters: int) -> list[Document]:
    """Documents until they have so many `characters`, or there is none left."""
    taken, size = [], 0
    for document in documents:
        taken.append(document)
        size += len(document.text)
        if size >= characters:
            break
    return taken


def _hash(document: Document) -> bytes:
    return hashlib.sha256(document.path.encode()).digest()
