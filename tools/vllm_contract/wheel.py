"""The Python sources of vLLM's CUDA wheel, without installing it."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Any Linux wheel has the same sources. pip asks for one of this machine otherwise.
_PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (35, 34, 31, 28, 17)]
_WHEEL = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp")


def sources_of(release: str, folder: Path) -> Path:
    """The directory that holds a release's folder `vllm`.

    Args:
        release: A directory with sources, a wheel's file, or a version to download (about 350 MB,
            of which 30 MB of sources stay in `folder`).
        folder: Where sources of wheels are unpacked, each version once.
    """
    given = Path(release)
    if given.is_dir():
        return given
    if given.suffix == ".whl":
        return _unpacked(given, folder / given.name.split("-")[1])
    if (folder / release / "vllm").is_dir():
        return folder / release
    with tempfile.TemporaryDirectory() as temporary:
        platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
        download = [sys.executable, "-m", "pip", "download", "--quiet", *_WHEEL, *platforms]
        subprocess.run([*download, "--dest", temporary, f"vllm=={release}"], check=True)
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        return _unpacked(wheel, folder / release)


def _unpacked(wheel: Path, out: Path) -> Path:
    """Unpack the Python sources of a wheel to `out`, all of them or none."""
    if not (out / "vllm").is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                wanted = [x for x in names if x.startswith("vllm/") and x.endswith(".py")]
                archive.extractall(temporary, wanted)
            out.mkdir(exist_ok=True)
            (Path(temporary) / "vllm").rename(out / "vllm")
    return out
