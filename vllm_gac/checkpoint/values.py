"""What is wrong with the values of a model's tensors; unlike opening it, this reads every one."""

from collections.abc import Iterator
from contextlib import closing
from itertools import chain

from tqdm import tqdm

from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.checkpoint.tensor_files import ShardFiles

# Relative difference of one RoPE frequency, computed on two machines.
_ROUNDING = 1e-5


def all_faults(checkpoint: Checkpoint, progress: bool = False) -> Iterator[str]:
    """Yield all `faults`, and one sentence for each tensor with values that no sound model has.

    Also reports other bytes than were written, and values out of range in what is made from the
    stored tensors. With `progress`, show a progress bar if that takes long.
    """
    if checkpoint.unread is not None:
        yield from faults(checkpoint)
        return
    sound = True
    for fault in chain(faults(checkpoint), _value_faults(checkpoint, progress)):
        sound = False
        yield fault
    if sound:
        yield from checkpoint.faults_of_made()
        yield from rope_faults(checkpoint)


def rope_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """One sentence for each RoPE table with a frequency that config.json does not give.

    Tables of other tools may hold any.
    """
    names = [name for name in checkpoint.tensors if name.endswith(".rope_inv_freq")]
    gac = checkpoint.config.gac
    if not names or gac is None or not str(gac.source.get("tool")).startswith("vllm-gac "):
        return
    from vllm_gac.layout.rope import inverse_frequencies

    layout = checkpoint.layout
    known = inverse_frequencies(checkpoint.config.rope, layout.head_dim)
    with checkpoint.reader(any_value=True) as read:
        for name in names:
            table = read(name)
            chosen = table[table != 0]  # padded pairs are 0
            near = (chosen[:, None] - known).abs().amin(1) <= _ROUNDING * chosen
            has_rope = layout.layers[int(name.split(".")[2])].has_rope
            if not near.all() or has_rope != bool(len(chosen)):
                yield (
                    f"{checkpoint.broken_part(name)}: has frequencies that RoPE of config.json "
                    "does not have, so one of them was changed after compression; restore "
                    "config.json, or change RoPE in the dense model's and compress again"
                )


def _value_faults(checkpoint: Checkpoint, progress: bool) -> Iterator[str]:
    """The stored tensors that have values out of range, or other bytes than were written."""
    tensors = checkpoint.tensors.items()
    with closing(ShardFiles(checkpoint.directory)) as files:
        for name, info in tqdm(tensors, "check", unit="tensor", delay=1, disable=not progress):
            if fault := files.fault(name, info):
                yield fault
