"""One engine's logprobs and completions, compared with another engine's."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.completions import equal_tokens


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
