"""digests.json: what tells whether a model is still what vllm-gac wrote.

It has the SHA-256 of config.json, of the index, of the tokenizer and of what else is small, and a
CRC-32 of each tensor. That is compared whenever the tensor is read, so that nothing is read twice.
A model without digests is read, too.
"""

import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.locate import TEMPLATES
from vllm_gac.checkpoint.untrusted_files import read_json, sha256_of_file
from vllm_gac.layout.schema import StrictModel, Version, validate

if TYPE_CHECKING:
    import torch

DIGESTS = "digests.json"
# People edit the card and add licences; nothing reads them.
_FREE = ("*.safetensors", "README.md", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", DIGESTS)
_Name = Annotated[str, Field(pattern=rf"^({TEMPLATES}/)?[^/\\\x00]{{1,255}}$")]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


class Digests(StrictModel):
    """digests.json, version 1.

    Attributes:
        version: 1.
        files: The SHA-256 of each small file.
        tensors: The CRC-32 of each tensor's bytes.
        run: The SHA-256 of what describes the run that wrote it, for --resume.
    """

    version: Version = 1
    files: Annotated[dict[_Name, _Sha256], Field(max_length=128)] = Field(default_factory=dict)
    tensors: dict[str, _Checksum] = Field(default_factory=dict)
    run: _Sha256 | None = None

    @classmethod
    def of(cls, directory: Path) -> "Digests":
        """Those of `directory`; empty if there are none. Raises CheckpointError for a bad file."""
        path = directory / DIGESTS
        return validate(cls, read_json(path), str(path)) if path.exists() else cls()

    def _write(self, directory: Path, **changes: str | Mapping[str, int | str]) -> None:
        write_json(directory / DIGESTS, self.model_copy(update=changes).model_dump())


def sign_tensors(directory: Path, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Add checksums of these tensors, which lie in the CPU's memory, to those of `directory`."""
    import torch

    digests, sums = Digests.of(directory), {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        sums[name] = zlib.crc32(raw.numpy().data)
    digests._write(directory, tensors=digests.tensors | sums)


def sign_files(directory: Path) -> None:
    """Write digests of all small files of a model directory beside those of its tensors."""
    signed = {
        str(path.relative_to(directory)): sha256_of_file(path)
        for path in sorted([*directory.iterdir(), *directory.glob(f"{TEMPLATES}/*")])
        if path.is_file() and not any(fnmatch(path.name, free) for free in _FREE)
    }
    Digests.of(directory)._write(directory, files=signed)


def sign_run(directory: Path, run: str) -> None:
    """Write down which run made the model in `directory`."""
    Digests.of(directory)._write(directory, run=run)


def unsign_files(directory: Path) -> None:
    """Drop the digests of small files, which may be written again then."""
    if (digests := Digests.of(directory)).files:
        digests._write(directory, files={})


def changed_files(directory: Path) -> Iterator[str]:
    """One sentence for each small file that is not as it was written.

    One may be missing: of a model on the Hub, not all are fetched.
    """
    for name, digest in Digests.of(directory).files.items():
        if (directory / name).exists() and sha256_of_file(directory / name) != digest:
            yield not_as_written(directory / name)


def not_as_written(path: Path, tensor: str | None = None) -> str:
    """What is said of a file, or of a tensor in it, that has other bytes than were written."""
    where = f"{path}: {tensor}" if tensor else str(path)
    return (
        f"{where}: is not what vllm-gac wrote, by {DIGESTS}; fetch or make the model again, or "
        f"remove {path.parent / DIGESTS} if this was changed on purpose"
    )
