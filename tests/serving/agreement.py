"""Compares served answers with the fp32 reference model on the same weights."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.serving.server import Server
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import logits, reference

TIE = 0.1  # logprobs this close may change their order in bf16
TOP_ERROR = 0.25  # largest allowed error of a top-5 logprob in bf16
ERROR = 1e-4  # in fp32, where only the order of sums differs: by 2e-5 at most

# Up to 211 tokens, more than two chunks of 96. Odd lengths make chunks and blocks end anywhere.
PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(211 - 13 * i)] for i in range(4)]
CHUNKED = ("--max-num-batched-tokens", "96", "--enable-prefix-caching")


def assert_agrees_with_reference(server: Server, directory: Path) -> None:
    """Serve every prompt twice, the second time from the prefix cache, and check each step."""
    checkpoint = open_checkpoint(directory)
    model = reference(checkpoint)
    for _ in range(2):
        for prompt, (tokens, top) in zip(PROMPTS, server.completions(PROMPTS, 16), strict=True):
            with checkpoint.reader() as read:
                sequence = torch.tensor([prompt + tokens])
                expected = logits(model, read, sequence)[0, len(prompt) - 1 : -1]
            _assert_steps_agree(expected.log_softmax(-1), tokens, top)
    hits = [line for line in server.metrics().splitlines() if "prefix_cache_hits_total{" in line]
    assert float(hits[0].split()[-1]) > 0, "the second round did not use the prefix cache"


def _assert_steps_agree(
    expected: torch.Tensor, tokens: list[int], top: list[dict[int, float]]
) -> None:
    for step, (gap, error) in enumerate(step_errors(expected, tokens, top)):
        assert gap < TIE, f"step {step}: another greedy token"
        assert error < TOP_ERROR, f"step {step}: a logprob is off by {error:.3f}"


def assert_agrees(
    answers: list[tuple[list[int], list[dict[str, float]]]],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    model: object,
    error: float = ERROR,
) -> None:
    """Check an fp32 engine's answers to `PROMPTS`: each token is the best, each logprob right.

    `logits_of` gives the expected logits of tokens, [1, tokens, vocab]; a failure names `model`.
    """
    for prompt, (tokens, top) in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            expected = logits_of(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        by_id = [{int(token): logprob for token, logprob in step.items()} for step in top]
        for errors in step_errors(expected.log_softmax(-1), tokens, by_id):
            assert max(errors) < error, model


def step_errors(
    expected: torch.Tensor, tokens: list[int], top: list[dict[int, float]]
) -> list[tuple[float, float]]:
    """By step: how far its token is below the reference's best, and the largest logprob error.

    `expected` are the reference's logprobs, [steps, vocab].
    """
    return [
        (
            float(row.max() - row[token]),
            max(abs(float(row[candidate]) - logprob) for candidate, logprob in served.items()),
        )
        for row, token, served in zip(expected, tokens, top, strict=True)
    ]
