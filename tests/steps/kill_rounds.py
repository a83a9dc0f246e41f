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
from tests.support.writing_verbs import (
    FILES,
    OVERWRITES,
    VERBS,
    digest,
    other_model,
    product,
    products,
    ran,
    said,
    write_inputs,
)
from vllm_gac.checkpoint.atomic_files import TEMPORARY

_MAX_KILLS = 3
_MAX_CHANGES = 120
_MAX_CHANGES_OF_FILES = 9


def main(directory: Path, rounds: int, seed: int = 0) -> dict[str, object]:
    """Kill verbs in `directory` and resume them, so many rounds."""
    write_inputs(directory)
    generator = random.Random(seed)
    expected, seconds = {}, {}
    wrong: list[str] = []
    kills: Counter[str] = Counter()
    into = directory / "into"
    for number in range(rounds):
        verb = list(VERBS)[number % len(VERBS)]
        if verb not in expected:
            sound = directory / f"{verb}.d"
            sound.mkdir()
            begun = _seconds()
            assert ran(verb, product(verb, sound), (), directory) == 0, said(directory)
            expected[verb], seconds[verb] = digest(product(verb, sound)), _seconds() - begun
        overwrites = verb in OVERWRITES and number // len(VERBS) % 2 == 0
        into.mkdir()
        out, old = product(verb, into), "nothing"
        if overwrites and verb in FILES:
            shutil.copytree(directory / f"{verb}.d", into, dirs_exist_ok=True)
            old = digest(out)
        elif overwrites:
            shutil.copytree(other_model(verb, directory), out)
            old = digest(out)
        where = f"round {number}: {verb}{' over another' if overwrites else ''}"
        more = OVERWRITES[verb] if overwrites else ()
        resume = () if verb in FILES else ("--resume",)
        was_killed = True
        for time_of_kill in range(generator.randint(1, _MAX_KILLS) + 1):
            resumed = resume if time_of_kill else ()
            if generator.random() < 0.5:
                kill = _after(generator.uniform(0, seconds[verb]))
            else:
                most = _MAX_CHANGES_OF_FILES if verb in FILES else _MAX_CHANGES
                kill = _before_change(generator.randint(1, most), into)
            status = ran(verb, out, (*more, *resumed), directory, kill)
            was_killed = status in (-signal.SIGKILL, -signal.SIGPROF)
            if not was_killed:
                break
            kills[verb] += 1
            if not _is_whole(out, old, expected[verb]):
                wrong.append(f"{where}: neither the old nor the new one is whole")
        if was_killed:
            status = ran(verb, out, (*more, *resume), directory)
        if verb == "schedule" and status and not out.exists():
            # What was written first is there. Whose it is nobody knows: it says to remove it.
            for path in products(verb, into):
                path.unlink(missing_ok=True)
            status = ran(verb, out, (), directory)
        # A run that was killed in its last moment has left nothing to resume.
        if status and "exists" not in said(directory):
            wrong.append(f"{where}: {said(directory)}")
        # Beside a file, its killed writer leaves a hidden directory that is never taken for one.
        there = sorted(path for path in into.iterdir() if not path.name.startswith(TEMPORARY))
        if digest(out) != expected[verb] or there != products(verb, into):
            wrong.append(f"{where}: other bytes, or leftovers")
        shutil.rmtree(into)
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


def _before_change(number: int, into: Path) -> Callable[[], None]:
    return lambda: kill_before_change(number, into)


def _is_whole(out: Path, old: str, new: str) -> bool:
    """Whether the new one is in its place, or the old one where the next run finds it."""
    moved = digest(out.with_name("out.partial") / "replaced")
    return digest(out) in (old, new) if out.exists() else moved == old


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
