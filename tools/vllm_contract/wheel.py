"""vLLM's CUDA wheel, without installing it: fetched, and its Python sources unpacked."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
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

    Raises:
        SystemExit: There is no such release, in a sentence.
    """
    if Path(release).is_dir():
        if not (Path(release) / "vllm").is_dir():
            raise SystemExit(f"{release}: holds no folder vllm; give the directory above it")
        return Path(release)
    out = folder / version_of(release)
    if not (out / "vllm").is_dir():
        # Unpacked elsewhere and moved, so that an interrupted run leaves no half of it.
        folder.mkdir(parents=True, exist_ok=True)
        with wheel_of(release) as wheel, tempfile.TemporaryDirectory(dir=folder) as temporary:
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                wanted = [x for x in names if x.startswith("vllm/") and x.endswith(".py")]
                archive.extractall(temporary, wanted)
            out.mkdir(exist_ok=True)
            (Path(temporary) / "vllm").rename(out / "vllm")
    return out


def version_of(release: str) -> str:
    """The version of a wheel's file; a version stays as it is."""
    return Path(release).name.split("-")[1] if release.endswith(".whl") else release


@contextmanager
def wheel_of(release: str) -> Iterator[Path]:
    """The given wheel, or that of a version, which stays while the `with` block runs."""
    if release.endswith(".whl"):
        if not zipfile.is_zipfile(release):
            raise SystemExit(f"{release}: no wheel; give the path of one, or a version")
        yield Path(release)
        return
    with tempfile.TemporaryDirectory() as temporary:
        platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
        download = [sys.executable, "-m", "pip", "download", "--quiet", *_WHEEL, *platforms]
        done = subprocess.run([*download, "--dest", temporary, f"vllm=={release}"], check=False)
        if done.returncode:
            raise SystemExit(
                f"vllm=={release}: pip has no wheel of it for Linux on x86-64; see above"
            )
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        yield wheel
