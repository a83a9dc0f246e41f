"""Prompts have exactly the scheduled length and share exactly the scheduled prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from loadtest.traffic import prompts
from loadtest.traffic.schedule import PromptRules, ScheduledRequest

RULES = PromptRules(block_tokens=16, low=100, high=5000, seed=7)


def request(length: int, *hash_ids: int) -> ScheduledRequest:
    return ScheduledRequest(timestamp=0, input_length=length, output_length=1, hash_ids=hash_ids)


@given(length=st.integers(1, 500), hashed=st.booleans(), index=st.integers(0, 10**6))
def test_token_ids_have_the_length_and_the_range(length: int, hashed: bool, index: int) -> None:
    blocks = range(-(-length // 16)) if hashed else ()
    ids = prompts.token_ids(request(length, *blocks), index, RULES)
    assert len(ids) == length
    assert all(type(i) is int and 100 <= i < 5000 for i in ids)
    assert len(prompts.text(request(length, *blocks), index, RULES).split()) == length


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    a = prompts.token_ids(request(40, 1, 2, 3), 0, RULES)
    b = prompts.token_ids(request(40, 1, 2, 4), 1, RULES)
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]
    assert a[:16] != a[16:32]


def test_traces_without_blocks_share_nothing() -> None:
    firsts = {tuple(prompts.token_ids(request(8), index, RULES)) for index in range(100)}
    assert len(firsts) == 100


def test_another_seed_is_another_prompt() -> None:
    other = PromptRules(block_tokens=16, low=100, high=5000, seed=8)
    assert prompts.token_ids(request(8, 1), 0, RULES) != prompts.token_ids(request(8, 1), 0, other)
