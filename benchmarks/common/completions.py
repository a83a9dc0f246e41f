"""How far two engines agree: their greedy completions, and their logprobs of the same text."""

import math
import statistics
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


def compared(said: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize the logprobs and answers in `said`, and compare them with those in `base`.

    Returns:
        `said`, with the perplexity, the mean and largest absolute difference of the text's
        logprobs, and the number of greedy tokens that are equal before the first difference of each
        answer, in place of the logprobs and answers.
    """
    found = {key: value for key, value in said.items() if key not in ("logprobs", "answers")}
    if "logprobs" in said:
        found["perplexity"] = math.exp(-statistics.fmean(said["logprobs"]))
    if "logprobs" in said and "logprobs" in base:
        pairs = zip(said["logprobs"], base["logprobs"], strict=True)
        differences = [abs(a - b) for a, b in pairs]
        found["mean_difference"] = statistics.fmean(differences)
        found["largest_difference"] = max(differences)
    if "answers" in said and "answers" in base:
        found["equal_tokens"] = sum(
            equal_tokens(a["tokens"], b["tokens"])
            for a, b in zip(said["answers"], base["answers"], strict=True)
        )
        found["tokens"] = sum(len(answer["tokens"]) for answer in said["answers"])
    return found
