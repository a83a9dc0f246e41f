"""How far two engines' greedy completions of the same prompts are equal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens before the first difference of each completion, all tokens, and gaps.

    A gap is by how much the first engine preferred its own token to the second one's, in logprobs,
    at the first difference of a completion.
    """

    equal: int
    total: int
    gaps: list[float]


def agreement(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> Agreement:
    """Compare completions as `engine_questions.complete` returns them, with `top` tokens."""
    equal, gaps = 0, []
    for left, right in zip(first, second, strict=True):
        until = equal_tokens(left["tokens"], right["tokens"])
        equal += until
        if until < len(left["tokens"]):
            top = dict(left["top"][until])
            gaps.append(max(top.values()) - top.get(right["tokens"][until], -math.inf))
    return Agreement(equal, sum(len(completion["tokens"]) for completion in first), gaps)


def equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two completions of one length share before they first differ."""
    pairs = enumerate(zip(left, right, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(left))
