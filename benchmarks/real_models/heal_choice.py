"""Prints the environment of the best of some trials of healing, by their logs.

python -m benchmarks.real_models.heal_choice LOGS NAME ...
"""

import json
import sys
from pathlib import Path

from benchmarks.real_models.lease_jobs import TRIALS, trial_name


def main(logs: Path, names: list[str]) -> None:
    """Print the variables that heal as the trial did that diverges least in the end."""
    best, chosen = float("inf"), TRIALS[1]
    for trial in TRIALS:
        name = trial_name(*trial)
        if name not in names:
            continue
        for line in (logs / f"{name}.log").read_text().splitlines():
            if line.startswith("{"):
                after = json.loads(line)["after"]["divergence"]
                print(f"# {name}: {after:.4f}")
                if after < best:
                    best, chosen = after, trial
    print(f"export HEAL_TRIAL={chosen[0]} HEAL_RATE={chosen[1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
