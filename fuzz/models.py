"""What is fuzzed: a config.json and a safetensors header, as `verify` and the loader read them.

An input is the two texts with SEPARATOR between them. The header gets its length before it and
as many zeros behind it as it asks for, so that mutations reach what comes after the framing.
"""

import math
from pathlib import Path

from fuzz.framing import SEPARATOR, data_size
from fuzz.mutations import mutated as mutate  # noqa: F401 -- of a model: any of its two texts
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format

# Layers with tensors of zeros for what a config skips can be larger than the files.
_MOST_ELEMENTS = 1 << 20


def check(data: bytes, directory: Path) -> bool:
    """Write the model `data` stands for to `directory`, read it; whether it was accepted.

    Raises AssertionError if a refusal is no sentence about a file in the directory, or if a tensor
    of an accepted model is not what its layout says; lets through what should not be raised.
    """
    config, _, header = data.partition(SEPARATOR)
    (directory / "config.json").write_bytes(config)
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(data_size(header))
    )
    try:
        _, checkpoint = open_any_format(directory)
        found = list(faults(checkpoint, finite=True))
        if not found:
            _read_every_tensor(checkpoint)
            return True
    except CheckpointError as e:
        found = [str(e)]
    for fault in found:
        assert str(directory) in fault, fault
        assert "Traceback" not in fault, fault
    return False


def _read_every_tensor(checkpoint: Checkpoint) -> None:
    with checkpoint.reader() as read:
        for name, shape in checkpoint.layout.tensors().items():
            if math.prod(shape) <= _MOST_ELEMENTS:
                found = tuple(read(name).shape)
                shared_table = name.endswith(".rope_inv_freq") and found[1:] == shape[1:]
                assert found == shape or shared_table, f"{name}: {found}, expected {shape}"
