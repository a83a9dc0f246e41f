"""In which order the files of tests begin."""

from collections.abc import Collection

# Folders with files that take minutes. Their tests come first: two processes share the files, and
# if such a file came last, one of them would have nothing to do.
LONG = ("kernels", "serving", "serving_configs", "loadtest", "steps", "demo", "benchmarks")


def in_order(
    files: Collection[str], always: Collection[str], slow: Collection[str], commit: str
) -> list[str]:
    """Files of tests, as paths from the root, in the order in which a run begins them.

    First come those with tests that always run, so that they end in time. Then those with other
    slow tests, of which a run may begin only some: where it starts among them depends on the
    commit, so that several commits together begin all. The rest needs no limit.
    """
    others = sorted(set(slow) - set(always))
    start = int(commit, 16) % len(others) if others else 0
    turns = {file: turn for turn, file in enumerate(others[start:] + others[:start])}

    def place(file: str) -> tuple[int, int, int, str]:
        # The name decides in the end: all processes of a run need the same order.
        kind = 0 if file in always else 1 if file in turns else 2
        return kind, turns.get(file, 0), _folder(file), file

    return sorted(files, key=place)


def _folder(file: str) -> int:
    folder = file.split("/")[1]
    return LONG.index(folder) if folder in LONG else len(LONG)
