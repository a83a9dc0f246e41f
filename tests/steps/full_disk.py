"""A full disk under every verb that writes: `unshare -rm python -m tests.steps.full_disk DIR N`.

Each verb runs on a disk with room for 0 to N - 1 of N parts of what it needs. It must fail with one
sentence and leave no half of a result. With more room, the run is resumed and must end in the bytes
of an undisturbed one. Prints, as JSON, how many runs met a full disk, and what was wrong.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

from tests.support.writing_verbs import (
    FILES,
    VERBS,
    digest,
    product,
    products,
    ran,
    said,
    small_disk,
    write_inputs,
)

_ROOM = 1 << 30
_PAGE = 4096


def main(directory: Path, parts: int) -> dict[str, object]:
    """Run every verb on disks of different sizes in `directory`."""
    write_inputs(directory)
    wrong: list[str] = []
    full: Counter[str] = Counter()
    disk = directory / "disk"
    with small_disk(disk) as resize:
        for verb in VERBS:
            sound, out = directory / f"{verb}.d", product(verb, disk)
            sound.mkdir()
            assert ran(verb, product(verb, sound), (), directory) == 0, said(directory)
            expected, needed = digest(product(verb, sound)), _bytes(sound)
            for part in range(parts):
                filler = disk / "filler"
                filler.write_bytes(bytes(_PAGE))  # a disk of 0 bytes has no bound
                resize(_bytes(disk) + needed * part // parts // _PAGE * _PAGE)
                status = ran(verb, out, (), directory)
                filler.unlink()
                where = f"{verb}, {part} of {parts}"
                if status:
                    full[verb] += 1
                    if fault := _fault(directory, out):
                        wrong.append(f"{where}: {fault}")
                resize(_ROOM)
                again = () if verb in FILES else ("--resume",)
                if status and ran(verb, out, again, directory):
                    wrong.append(f"{where}: resumed: {said(directory)}")
                if digest(out) != expected or sorted(disk.iterdir()) != products(verb, disk):
                    wrong.append(f"{where}: other bytes, or leftovers {_names(disk)}")
                for path in disk.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"full": full, "wrong": wrong}


def _fault(directory: Path, out: Path) -> str | None:
    """What a run that met a full disk did wrong; None if nothing."""
    told = said(directory)
    if len(told.splitlines()) != 1 or not told.removeprefix("vllm-gac: ").startswith("error: "):
        return f"not one sentence: {told}"
    if "No space left on device" not in told and "I/O error" not in told:
        return f"another error: {told}"
    return f"half of a result: {_names(out.parent)}" if out.exists() else None


def _names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def _bytes(path: Path) -> int:
    """What the files at `path` take on the disk."""
    files = list(path.rglob("*")) if path.is_dir() else [path]
    return sum(-(-file.stat().st_size // _PAGE) * _PAGE for file in files)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
