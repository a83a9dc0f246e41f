"""In which order the files of tests begin."""

from tests.support.order import in_order

FAST = ("tests/api/test_a.py", "tests/serving/test_fast.py")
ALWAYS = ("tests/steps/test_always.py", "tests/kernels/test_always.py")
SLOW = tuple(f"tests/serving/test_{name}.py" for name in "abc")
FILES = (*FAST, *SLOW, *ALWAYS)


def order(commit: str) -> list[str]:
    return in_order(FILES, ALWAYS, (*ALWAYS, *SLOW), commit)


def test_what_always_runs_comes_first_and_what_is_fast_last() -> None:
    found = order("c0ffee")
    assert found[:2] == ["tests/kernels/test_always.py", "tests/steps/test_always.py"]
    assert set(found[2:5]) == set(SLOW)
    assert found[5:] == ["tests/serving/test_fast.py", "tests/api/test_a.py"]


def test_commits_together_begin_with_every_slow_file() -> None:
    begun = {order(f"{number:040x}")[2] for number in range(3)}
    assert begun == set(SLOW)
    # The others follow in turn.
    assert order("1")[2:5] == [SLOW[1], SLOW[2], SLOW[0]]


def test_without_a_limit_folders_that_take_long_come_first() -> None:
    found = in_order(("tests/api/test_a.py", "tests/steps/test_b.py"), (), (), "0")
    assert found == ["tests/steps/test_b.py", "tests/api/test_a.py"]


def test_the_order_of_what_is_given_does_not_matter() -> None:
    files = [f"tests/{folder}/test_{name}.py" for folder in ("steps", "cli") for name in "cab"]
    slow, always = files[:2], files[2:4]
    orders = [in_order(given, always, slow, "7d") for given in (files, files[::-1])]
    assert orders[0] == orders[1]
