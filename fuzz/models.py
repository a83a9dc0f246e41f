"""The fuzz target for models: a config.json and a safetensors header, as `verify` reads them.

An input is the two texts with SEPARATOR between them. The target writes the header with its length
before it and as many zeros after it as it declares. So mutations reach the code behind the framing.
"""

import math
from pathlib import Path

from fuzz.framing import SEPARATOR, data_size
from fuzz.mutations import mutated as mutate  # noqa: F401 -- mutates either text
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format

# If a config skips parts of a layer, they become tensors of zeros. These can be larger than the
# files.
_MAX_ELEMENTS = 1 << 20


def check(data: bytes, directory: Path) -> bool:
    """Write the model of the input `data` into `directory`, and read it.

    Returns whether the model was accepted. Raises AssertionError if a refusal does not name a file
    in the directory, or if a tensor of an accepted model does not have the shape in its layout.
    Unexpected exceptions propagate.
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
            if math.prod(shape) <= _MAX_ELEMENTS:
                found = tuple(read(name).shape)
                shared_table = name.endswith(".rope_inv_freq") and found[1:] == shape[1:]
                assert found == shape or shared_table, f"{name}: {found}, expected {shape}"
