"""The prompt of a scheduled request: token ids of exactly the scheduled length, or words for chat.

The tokens of a block depend only on its hash id and the schedule's seed. So requests with equal
leading ids share a prefix, other requests share none, and every run of a schedule sends the same
bytes.
"""

import numpy as np
from numpy.typing import NDArray

from loadtest.traffic.schedule import PromptRules, ScheduledRequest

# With the space before it, each word is one token in the tokenizers of the Llama, Mistral, Qwen and
# GPT families. So the length in tokens is close to the scheduled one. The server's usage field
# reports the true length.
_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law
"""
_WORDS = tuple(_TEXT.split())


def token_ids(request: ScheduledRequest, index: int, rules: PromptRules) -> list[int]:
    """`request.input_length` token ids.

    `index` is the request's place in the schedule. It makes prompts unique if a trace has no hash
    ids.
    """
    blocks = [_block(rules, 0, hash_id) for hash_id in request.hash_ids]
    if not blocks:
        count = -(-request.input_length // rules.block_tokens)
        blocks = [_block(rules, 1, index, position) for position in range(count)]
    ids: list[int] = np.concatenate(blocks)[: request.input_length].tolist()
    return ids


def text(request: ScheduledRequest, index: int, rules: PromptRules) -> str:
    """`request.input_length` common words. They share prefixes as `token_ids` do."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in token_ids(request, index, rules))


def _block(rules: PromptRules, *key: int) -> NDArray[np.int64]:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([rules.seed, *key])))
    return rng.integers(rules.low, rules.high, rules.block_tokens)
