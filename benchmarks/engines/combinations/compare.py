"""What an engine said of a text and to prompts, against what another said."""

import math
import statistics
from collections.abc import Mapping
from typing import Any


def compared(said: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """`said` with its logprobs and answers summed up, and their differences from those of `base`.

    Perplexity; mean and largest absolute difference of the logprobs of the text's tokens; greedy
    tokens of all answers that are equal up to the first that differs.
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
            _equal(a["tokens"], b["tokens"])
            for a, b in zip(said["answers"], base["answers"], strict=True)
        )
        found["tokens"] = sum(len(answer["tokens"]) for answer in said["answers"])
    return found


def _equal(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))
