"""State dicts in files of torch.save, such as pytorch_model.bin.

torch.load reads them with `weights_only=True`, which runs no code of a file, and never without it.
A file is mapped, so that a tensor takes memory when it is read. Only the zip format can be mapped,
which torch.save writes since torch 1.6.
"""

import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gac.checkpoint.regular_files import open_pinned
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize

if TYPE_CHECKING:
    import torch

# It says how to make safetensors of a file that is refused.
PAGE = "docs/guide.md#models-in-a-pickle"
_REFUSED_NAME = re.compile(r"GLOBAL ([\w.]+)")


def load_state_dict(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of the state dict in `path` by name, contiguous and mapped.

    Raises CheckpointError naming the file if torch refuses it or it is damaged, and the tensor if
    one is not contiguous.
    """
    import torch

    with open_pinned(path) as same:
        try:
            _refuse_packed(same)
            state = torch.load(same, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # torch raises a dozen kinds for files that are damaged
            raise CheckpointError(
                f"{path}: torch.load(weights_only=True) cannot read it ({_reason(e)}); if it holds "
                f"a whole module, {PAGE} says how to make safetensors of it, else fetch it again"
            ) from e
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path}: not a state dict; save model.state_dict()")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path}: {sanitize(name)}: {type(tensor).__name__}, expected a tensor; save "
                "model.state_dict()"
            )
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_contiguous():
            raise CheckpointError(
                f"{path}: {sanitize(name)}: not stored in one piece; save it as .contiguous()"
            )
    return {name: tensor.detach() for name, tensor in state.items()}


def _refuse_packed(path: Path) -> None:
    """Raise ValueError for what torch.save never writes: its bytes would not be those of tensors.

    torch maps compressed members as if they were not, and unpacks a pickle of any size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile:
        raise ValueError("no zip file, as torch.save writes since 1.6, or it is cut off") from None
    is_packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if is_packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise ValueError("members that are larger than what is stored")


def _reason(error: Exception) -> str:
    """What torch says is wrong, without its advice to load the file by running it."""
    if refused := _REFUSED_NAME.search(str(error)):
        return f"it names {sanitize(refused[1])}"
    return sanitize(str(error).partition(". ")[0] or type(error).__name__)
