"""Coverage-guided fuzzing of all code that reads untrusted files: `make fuzz`.

    python -m fuzz models|documents CORPUS... [FLAG...]

libFuzzer gets the arguments after the first: directories of inputs, then flags such as
-max_total_time=600.
"""

import sys
import tempfile
from pathlib import Path

import atheris
import torch  # imported early: not instrumented, and before the time limit runs

with atheris.instrument_imports(include=["vllm_gac"]):
    from fuzz import documents, models


def main() -> None:
    target = {"models": models, "documents": documents}[sys.argv.pop(1)]
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        atheris.Setup(
            sys.argv,
            lambda data: target.check(data, Path(directory)) and None,  # libFuzzer requires None
            custom_mutator=lambda data, limit, seed: target.mutate(
                data, limit, seed, atheris.Mutate
            ),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
