"""Compares served answers with the fp32 reference model on the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.serving.server import Answers, Server
from tests.support.stored_models import logits_of

TIE = 0.1  # logprobs this close may change their order in bf16
TOP_ERROR = 0.25  # largest allowed error of a top-5 logprob in bf16
ERROR = 1e-4  # in fp32, where only the order of sums differs: by 2e-5 at most

# Up to 211 tokens, more than two chunks of 96. Odd lengths make chunks and blocks end anywhere.
PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(211 - 13 * i)] for i in range(4)]
CHUNKED = ("--max-num-batched-tokens", "96", "--enable-prefix-caching")


def assert_agrees_with_reference(server: Server, directory: Path) -> None:
    """Serve every prompt twice, the second time from the prefix cache, and check each step."""
    expected = partial(logits_of, directory)
    for _ in range(2):
        assert_agrees(server.completions(PROMPTS, 16), expected, directory, TIE, TOP_ERROR)
    hits = [line for line in server.metrics().splitlines() if "prefix_cache_hits_total{" in line]
    assert float(hits[0].split()[-1]) > 0, "the second round did not use the prefix cache"


def prompt_logprobs(logits_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The logprobs of all tokens of PROMPTS, but of the first of each."""
    rows = [logits_of(torch.tensor([prompt]))[0].log_softmax(-1) for prompt in PROMPTS]
    each = zip(rows, PROMPTS, strict=True)
    return torch.cat([row[range(len(prompt) - 1), prompt[1:]] for row, prompt in each])


def assert_agrees(
    answers: Answers,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    model: object,
    max_gap: float = ERROR,
    max_error: float = ERROR,
) -> None:
    """Check answers to `PROMPTS`: each token is the reference's best, and each logprob right.

    A token's logprob may be `max_gap` below the best one's, and a top-5 logprob `max_error` off.
    """
    for prompt, (tokens, top) in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            expected = logits_of(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        steps = zip(expected.log_softmax(-1), tokens, top, strict=True)
        for step, (row, token, served) in enumerate(steps):
            gap = float(row.max() - row[token])
            assert gap < max_gap, f"{model}, step {step}: another greedy token"
            error = max(abs(float(row[int(name)]) - logprob) for name, logprob in served.items())
            assert error < max_error, f"{model}, step {step}: a logprob is off by {error:.2g}"
