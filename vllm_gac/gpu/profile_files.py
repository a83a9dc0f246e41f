"""The GPU profiles that come with the package, and others by path."""

import functools
import json
from pathlib import Path

from vllm_gac.checkpoint.atomic_files import write_text
from vllm_gac.checkpoint.headers import version_of
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import ProfileError
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.layout.schema import validate

DEFAULT_GPU = "h200"
_SHIPPED = Path(__file__).parent / "profiles"


@functools.cache
def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles in the package, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


def read_profile(gpu: str = DEFAULT_GPU) -> GpuProfile:
    """The profile of a GPU: a shipped one, by its name, or one by the path of a profile.json.

    Raises ProfileError if there is no such profile, or it is malformed.
    """
    if gpu.lower() in shipped_profiles():
        path = _SHIPPED / f"{gpu.lower()}.json"
    elif gpu.endswith(".json"):
        path = Path(gpu)
    else:
        raise ProfileError(
            f"no profile of GPU {gpu!r}: there are {', '.join(shipped_profiles())}; measure "
            "others on the GPU itself, with 'vllm-gac profile --out profile.json', and give the "
            "path of that file"
        )
    return _read(path, version_of(path.stat()) if path.is_file() else None)


@functools.cache
def _read(path: Path, _version: tuple[int, int] | None) -> GpuProfile:
    return validate(GpuProfile, read_json(path, ProfileError), str(path), ProfileError)


def profile_of_gpu(name: str) -> GpuProfile | None:
    """The shipped profile of the GPU that its driver calls `name`; None if there is none."""
    profiles = (read_profile(shipped) for shipped in shipped_profiles())
    return next((profile for profile in profiles if profile.gpu == name), None)


def write_profile(path: Path, profile: GpuProfile) -> None:
    """Write `path` atomically, one sweep per line. Raises CheckpointError if that fails."""
    members = []
    for key, value in profile.model_dump(exclude_defaults=True).items():
        if isinstance(value, list):
            entries = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
            members.append(f'  "{key}": [\n{entries}\n  ]')
        else:
            members.append(f'  "{key}": {json.dumps(value)}')
    write_text(path, "{\n" + ",\n".join(members) + "\n}\n")
