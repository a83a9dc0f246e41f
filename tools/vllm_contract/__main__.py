"""Says in a line each what a vLLM release does not have that vllm-gac relies on.

`python -m tools.vllm_contract 0.33.0` downloads the wheel; a wheel's file or a directory that holds
the folder `vllm` will do, too. Exits with 1 if there is anything to say.
"""

import argparse
import sys
from pathlib import Path

from tools.vllm_contract.contract import ROOT, broken
from tools.vllm_contract.sources import Release
from tools.vllm_contract.wheel import sources_of


def main() -> int:
    """Check the releases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contract", description=__doc__)
    parser.add_argument("release", nargs="+", help="version, wheel or directory")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/vllm", help="for sources")
    arguments = parser.parse_args()
    count = 0
    for name in arguments.release:
        release = Release(sources_of(name, arguments.folder), ROOT)
        faults, checked = broken(release)
        for fault in faults:
            print(fault)
        count += len(faults)
        print(f"vLLM {release.version}: {checked}, {len(faults)} broken", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
