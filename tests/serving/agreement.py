"""What was served against the fp32 reference model on the same weights."""

from pathlib import Path

import torch

from tests.serving.server import Server
from vllm_gac.checkpoint import open_checkpoint
from vllm_gac.forward import logits, reference

TIE = 0.1  # logprobs this close may swap places under bf16
TOP_ERROR = 0.25  # largest error allowed of a bf16 top-5 logprob

# Longer than two chunks of 96 tokens, and of odd lengths, so that chunks and blocks end anywhere.
PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(211 - 13 * i)] for i in range(4)]
CHUNKED = ("--max-num-batched-tokens", "96", "--enable-prefix-caching")


def assert_agrees_with_reference(server: Server, directory: Path, max_tokens: int = 16) -> None:
    """Serve every prompt twice, the second time from the prefix cache, and check each step."""
    checkpoint = open_checkpoint(directory)
    model = reference(checkpoint)
    for _ in range(2):
        for prompt, (tokens, top) in zip(
            PROMPTS, server.completions(PROMPTS, max_tokens), strict=True
        ):
            with checkpoint.reader() as read:
                sequence = torch.tensor([prompt + tokens])
                expected = logits(model, read, sequence)[0, len(prompt) - 1 : -1]
            _assert_steps_agree(expected.log_softmax(-1), tokens, top)
    hits = [line for line in server.metrics().splitlines() if "prefix_cache_hits_total{" in line]
    assert float(hits[0].split()[-1]) > 0, "the second round did not use the prefix cache"


def _assert_steps_agree(
    expected: torch.Tensor, tokens: list[int], top: list[dict[int, float]]
) -> None:
    for step, (token, served) in enumerate(zip(tokens, top, strict=True)):
        best = float(expected[step].max())
        assert best - float(expected[step, token]) < TIE, f"step {step}: another greedy token"
        for candidate, logprob in served.items():
            error = abs(float(expected[step, candidate]) - logprob)
            assert error < TOP_ERROR, f"step {step}: logprob of {candidate} is off by {error:.3f}"
