"""Whether an engine computes what the fp32 reference model computes, token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_gac.compression.reference_model import head_weights, reference, unembed
from vllm_gac.steps.evaluate.perplexity import checked, last_states


def against_reference(
    engine: Sequence[tuple[list[float], list[int]]],
    model: Path,
    windows: Sequence[torch.Tensor],
    device: str,
) -> dict[str, float]:
    """Compare what `prompt_scores` says of `windows`, [length] each, with the reference model.

    Returns:
        `loss` and `reference_loss`, nats per token; `difference`, the mean of the absolute
        differences of each token's loss; `agreement`, of the first choice.
    """
    theirs, choices = _reference_scores(model, windows, device)
    ours = torch.tensor([score for scores, _ in engine for score in scores])
    same = torch.tensor([token for _, chosen in engine for token in chosen]) == choices
    return {
        "loss": float(-ours.mean()),
        "reference_loss": float(-theirs.mean()),
        "difference": float((ours - theirs).abs().mean()),
        "agreement": float(same.float().mean()),
    }


@torch.inference_mode()
def _reference_scores(
    model: Path, windows: Sequence[torch.Tensor], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log probability of each token but the first ones, and the token that is likeliest."""
    checkpoint = checked(model)
    of = reference(checkpoint, device=device)
    states = last_states(checkpoint, of, [window[None] for window in windows], progress=False)
    with checkpoint.reader() as read:
        weights = head_weights(of, read)
    scores, choices = [], []
    for window, hidden in zip(windows, states, strict=True):
        logits = unembed(of, weights, hidden[0, :-1].to(of.device))
        targets = window[1:, None].to(of.device)
        scores.append(logits.log_softmax(-1).gather(1, targets)[:, 0].cpu())
        choices.append(logits.argmax(-1).cpu())
    return torch.cat(scores), torch.cat(choices)


def prompt_scores(llm: Any, windows: list[list[int]]) -> list[tuple[list[float], list[int]]]:
    """In the engine's process: the same of each window, by its prompt's log probabilities."""
    from vllm import SamplingParams

    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    prompts = [{"prompt_token_ids": window} for window in windows]
    by_prompt = []
    for output in llm.generate(prompts, score, use_tqdm=False):
        steps = output.prompt_logprobs[1:]
        scores = [
            step[token].logprob
            for token, step in zip(output.prompt_token_ids[1:], steps, strict=True)
        ]
        likeliest = [max(step, key=lambda token: step[token].logprob) for step in steps]
        by_prompt.append((scores, likeliest))
    return by_prompt
