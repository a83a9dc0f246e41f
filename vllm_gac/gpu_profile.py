"""The GPU profiles that come with the package, and others by path."""

import functools
from pathlib import Path

from vllm_gac.errors import ProfileError
from vllm_gac.schema import GpuProfile, validate
from vllm_gac.strict_json import read_json

DEFAULT_GPU = "h200"
_SHIPPED = Path(__file__).parent / "profiles"


def shipped_profiles() -> list[str]:
    """Names that `read_profile` knows."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


@functools.cache
def read_profile(gpu: str = DEFAULT_GPU) -> GpuProfile:
    """The profile of `gpu`: the name of a shipped one, or the path of a profile.json.

    Raises ProfileError if there is none, or it is malformed.
    """
    if gpu.lower() in shipped_profiles():
        path = _SHIPPED / f"{gpu.lower()}.json"
    elif gpu.endswith(".json"):
        path = Path(gpu)
    else:
        raise ProfileError(
            f"no profile of GPU {gpu!r}: there are {', '.join(shipped_profiles())}, "
            "or give the path of a profile.json"
        )
    return validate(GpuProfile, read_json(path, ProfileError), str(path), ProfileError)
