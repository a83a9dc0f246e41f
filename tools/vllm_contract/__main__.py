"""Says in a line each what a vLLM release does not have that vllm-gac relies on.

`python -m tools.vllm_contract DIRECTORY` reads the folder `vllm` in it. Exits with 1 if there is
anything to say. Of several releases it also names the engine options that each has and the one
before it does not.
"""

import argparse
import ast
import sys
from itertools import pairwise
from pathlib import Path

from tools.vllm_contract.behaviours import BEHAVIOURS, OVERRIDDEN, changed_behaviours
from tools.vllm_contract.sources import Release
from tools.vllm_contract.uses import uses_of

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Check the releases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contract", description=__doc__)
    parser.add_argument("release", nargs="+", type=Path, help="directory with the folder vllm")
    arguments = parser.parse_args()
    count, releases = 0, []
    for directory in arguments.release:
        if not (directory / "vllm").is_dir():
            parser.error(f"{directory}: holds no folder vllm; give the directory above it")
        release = Release(directory, ROOT)
        releases.append(release)
        faults, checked = broken(release)
        for fault in faults:
            print(fault)
        count += len(faults)
        print(f"vLLM {release.version}: {checked}, {len(faults)} broken", file=sys.stderr)
    for before, after in pairwise(releases):
        added = sorted(engine_options(after) - engine_options(before))
        print(f"new engine options in vLLM {after.version}: {', '.join(added) or 'none'}")
    return 1 if count else 0


def engine_options(release: Release) -> set[str]:
    """The fields of vLLM's EngineArgs."""
    definition = release.find("vllm.engine.arg_utils", "EngineArgs")
    members = release.members(definition) if definition is not None else {}
    return {name for name, node in members.items() if isinstance(node, ast.AnnAssign)}


def broken(release: Release) -> tuple[list[str], str]:
    """What vllm-gac relies on that `release` does not have, and how much was checked.

    Returns:
        A sentence for each fault; and the numbers of names, attributes and calls and of behaviours
        that were compared, as text.
    """
    faults: list[str] = []
    files = []
    for uses in uses_of(release):
        faults += uses.broken()
        files.append(uses)
    faults += changed_behaviours(release)
    names: set[str] = set().union(*(uses.names for uses in files))
    members = set().union(*(uses.members for uses in files))
    calls = sum(uses.calls for uses in files)
    behaviours = len(BEHAVIOURS) + sum(len(x.split()) for x in OVERRIDDEN.values())
    checked = (
        f"{len(names)} names, {len(members)} attributes, {calls} calls and overrides, "
        f"{behaviours} behaviours"
    )
    return faults, checked


if __name__ == "__main__":
    sys.exit(main())
