"""Says in a line each what a vLLM release does not have that vllm-gac relies on.

`python -m tools.vllm_contract DIRECTORY` reads the folder `vllm` in it, and compares it with the
installed release: what mypy says of our sources with the one and not with the other, and what
`behaviours.yaml` lists. Exits with 1 if there is anything to say. It also names the engine options
that the installed release does not have.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tools.vllm_contract.sources import Release, changes

ROOT = Path(__file__).parents[2]
# The types of what vLLM builds on say nothing of vLLM, and reading them takes minutes.
_MYPY = """
[mypy]
mypy_path = {release}
check_untyped_defs = true
ignore_missing_imports = true
[mypy-vllm.*]
follow_imports = silent
[mypy-triton.*,transformers.*,xformers.*,scipy.*,datasets.*,huggingface_hub.*,openai.*,ray.*]
follow_imports = skip
"""


def main() -> int:
    """Check the release that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contract", description=__doc__)
    parser.add_argument("release", type=Path, help="directory with the folder vllm")
    directory = parser.parse_args().release
    if not (directory / "vllm").is_dir():
        parser.error(f"{directory}: holds no folder vllm; give the directory above it")
    release, ours = Release(directory), ROOT / "vllm_gac"
    installed = installed_release()
    before, after = type_faults(ours, installed), type_faults(ours, release)
    faults = [*changes(release, installed, ours), *sorted((after - before).elements())]
    print(*faults, sep="\n", end="\n" * bool(faults))
    print(f"vLLM {release.version}: {len(faults)} broken", file=sys.stderr)
    one, other = (x.fields("vllm.engine.arg_utils", "EngineArgs") for x in (installed, release))
    added = ", ".join(sorted(other - one)) or "none"
    print(f"new engine options since {installed.version}: {added}", file=sys.stderr)
    return 1 if faults else 0


def installed_release() -> Release:
    """The release that this environment has."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit("vllm: is not installed, to compare with; run make install")
    return Release(Path(found.origin).parents[1])


def type_faults(ours: Path, release: Release) -> Counter[str]:
    """What mypy says of our sources with a release, but for the lines of it.

    Args:
        ours: The directory of our sources.
        release: What they are checked with.
    """
    with tempfile.TemporaryDirectory() as scratch:
        # mypy takes no directory of installed packages as a path of sources.
        (Path(scratch) / "vllm").symlink_to((release.root / "vllm").resolve())
        config = Path(scratch) / "mypy.ini"
        config.write_text(_MYPY.format(release=scratch))
        command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-pretty"]
        command += ["--no-incremental", str(ours)]
        run = subprocess.run(command, cwd=ours.parent, capture_output=True, text=True, check=False)
    # Python exits with 1, too, where it has no mypy.
    if run.returncode not in (0, 1) or not re.search(r"^(Success|Found)\b", run.stdout, re.M):
        raise SystemExit(f"mypy: {run.stdout}{run.stderr}")
    lines = re.findall(r"^(.+?\.py):\d+: error: (.+)$", run.stdout, re.M)
    return Counter(f"{file}: {fault}" for file, fault in lines)


if __name__ == "__main__":
    sys.exit(main())
