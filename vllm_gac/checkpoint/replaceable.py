"""What --overwrite may replace: a directory with nothing but a model that vllm-gac wrote."""

import os
from fnmatch import fnmatch
from pathlib import Path

from vllm_gac.checkpoint.companions import COMPANIONS
from vllm_gac.checkpoint.open import INDEX_FILE
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import DiskError

_WRITTEN = ("config.json", "plan.json", "README.md", INDEX_FILE, "*.safetensors", *COMPANIONS)


def check_replaceable(out: Path) -> None:
    """Raise DiskError unless `out` is absent, or holds a gac model and no other file."""
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise DiskError(f"{out}: is not a model directory; --overwrite replaces nothing else")
    for path in sorted(out.iterdir()):
        written = any(fnmatch(path.name, pattern) for pattern in _WRITTEN)
        if not written or path.is_symlink() or not path.is_file():
            raise DiskError(
                f"{path}: vllm-gac did not write this; --overwrite would remove it: move it away, "
                "or choose another output"
            )
    if not (out / "config.json").exists() or "gac" not in read_json(out / "config.json"):
        raise DiskError(
            f"{out}: holds no model that vllm-gac wrote; --overwrite replaces nothing else"
        )
