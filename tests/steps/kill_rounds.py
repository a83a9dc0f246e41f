"""`kill -9` again and again, at random: `python -m tests.steps.kill_rounds DIR ROUNDS [SEED]`.

Each round takes a verb and kills it one to three times: at any instruction, or right before one of
its changes to files. A killed run is followed by one with --resume, which may be killed, too. Half
of the rounds overwrite a model that was there before. After each kill, the old one or the new one
must be whole, and in the end there must be the bytes of an undisturbed run and nothing beside them.
Prints, as JSON, how many kills there were and what was wrong.
"""

import json
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.killing import kill_before_change
from tests.support.writing_verbs import arguments, digest, ran, write_inputs

KINDS = ("compress", "import", "repair", "heal")
_MOST_KILLS = 3
_MOST_CHANGES = 120


def main(directory: Path, rounds: int, seed: int = 0) -> dict[str, object]:
    """Kill verbs in `directory` and resume them, so many rounds."""
    write_inputs(directory)
    expected, seconds = {}, {}
    for verb in KINDS:
        begun = _seconds()
        assert ran(arguments(verb, directory / verb), directory) == 0, _said(directory)
        expected[verb], seconds[verb] = digest(directory / verb), _seconds() - begun
    generator = random.Random(seed)
    wrong: list[str] = []
    kills: Counter[str] = Counter()
    out = directory / "out"
    for number in range(rounds):
        verb = KINDS[number % len(KINDS)]
        overwrites = number // len(KINDS) % 2 == 0
        old = "nothing"
        if overwrites:
            shutil.copytree(directory / ("repair" if verb == "import" else "import"), out)
            old = digest(out)
        where = f"round {number}: {verb}{' --overwrite' if overwrites else ''}"
        more = ("--overwrite",) if overwrites else ()
        was_killed = True
        for time_of_kill in range(generator.randint(1, _MOST_KILLS) + 1):
            resumed = ("--resume",) if time_of_kill else ()
            line = arguments(verb, out, *more, *resumed)
            if generator.random() < 0.5:
                status = ran(line, directory, _after(generator.uniform(0, seconds[verb])))
            else:
                change = generator.randint(1, _MOST_CHANGES)
                status = ran(line, directory, _before_change(change, out))
            was_killed = status in (-signal.SIGKILL, -signal.SIGPROF)
            if not was_killed:
                break
            kills[verb] += 1
            if not _is_whole(out, old, expected[verb]):
                wrong.append(f"{where}: neither the old nor the new one is whole")
        if was_killed:
            status = ran(arguments(verb, out, *more, "--resume"), directory)
        # A run that was killed in its last moment has left nothing to resume.
        if status and "out: exists" not in _said(directory):
            wrong.append(f"{where}: {_said(directory)}")
        if digest(out) != expected[verb] or out.with_name("out.partial").exists():
            wrong.append(f"{where}: other bytes, or leftovers")
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name("out.partial"), ignore_errors=True)
    return {"kills": kills, "wrong": wrong}


def _seconds() -> float:
    """CPU seconds of all runs so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _after(seconds: float) -> Callable[[], None]:
    """Has the process die after so many seconds of its CPU time, however busy the machine is."""

    def set_timer() -> None:
        signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-3))  # nobody handles its SIGPROF

    return set_timer


def _before_change(number: int, out: Path) -> Callable[[], None]:
    return lambda: kill_before_change(number, out)


def _is_whole(out: Path, old: str, new: str) -> bool:
    """Whether the new one is in its place, or the old one where the next run finds it."""
    moved = digest(out.with_name("out.partial") / "replaced")
    return digest(out) in (old, new) if out.exists() else moved == old


def _said(directory: Path) -> str:
    return (directory / "said").read_text().strip()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
