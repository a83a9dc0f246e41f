"""`kill -9` before every N-th change to files: `python -m tests.steps.every_kill DIR VERB N`.

With N of 0 the run may write no file of more than 20,000 bytes instead, as on a full disk. Either
is followed by a run with --resume, which must end in the bytes of an undisturbed one and leave
nothing beside them. Prints, as JSON, how many kills there were and what was wrong.
"""

import json
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from tests.support.killing import kill_before_change
from tests.support.writing_verbs import digest, ran, said, write_inputs

_LARGEST = (20_000, 20_000)


def main(directory: Path, verb: str, step: int) -> dict[str, object]:
    """Stop a verb in `directory` wherever a step ends, and resume it."""
    write_inputs(directory)
    sound, into = directory / "sound", directory / "into"
    sound.mkdir()
    assert ran(verb, sound / "out", (), directory) == 0, said(directory)
    expected = digest(sound / "out")
    out, wrong, kills = into / "out", [], 0
    while True:
        into.mkdir()
        if step:
            stop = partial(kill_before_change, (kills + 1) * step, out)
        else:
            stop = partial(resource.setrlimit, resource.RLIMIT_FSIZE, _LARGEST)
        status = ran(verb, out, (), directory, stop)
        if step and status != -signal.SIGKILL:
            return {"kills": kills, "wrong": wrong}
        if not step and ("cannot be written" not in said(directory) or out.exists()):
            wrong.append(f"full disk: {said(directory)}")
        kills += 1
        status = ran(verb, out, ("--resume",), directory)
        if status:
            wrong.append(f"stop {kills}: {said(directory)}")
        if digest(out) != expected or list(into.iterdir()) != [out]:
            wrong.append(f"stop {kills}: other bytes, or leftovers")
        shutil.rmtree(into)
        if not step:
            return {"kills": kills, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
