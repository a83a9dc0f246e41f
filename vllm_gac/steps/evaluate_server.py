"""Perplexity on text files of a model that a running OpenAI-compatible server has.

Prompts are sent to the completions API as token ids, and come back echoed with their log
probabilities. lm-eval asks in the same way.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel
from tqdm import tqdm

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.errors import ServerError
from vllm_gac.steps.bounded_answer import ask
from vllm_gac.steps.evaluate import DEFAULT_SEQUENCE_LENGTH, exp_of_mean, window_batches

if TYPE_CHECKING:
    import torch

# By how much rounding may lift a log probability above 0.
_ROUNDING = 0.01
# A token of an answer has about 150 bytes: its text, three times, and two log probabilities.
_BYTES_OF_A_TOKEN = 1 << 12
# Servers may bound them: those of serving_configs/vllm do, the demo's at 8.
_PROMPTS_OF_A_REQUEST = 8


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None  # vLLM's addition


class _Models(BaseModel):
    data: list[_Model]


class _Logprobs(BaseModel):
    token_logprobs: list[float | None]


class _Choice(BaseModel):
    logprobs: _Logprobs | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


def evaluate_server(
    tokenizer: str | Path,
    texts: Sequence[str | Path],
    url: str,
    *,
    revision: str | None = None,
    served_model_name: str | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    progress: bool = False,
) -> tuple[float, int]:
    """(perplexity, predicted tokens) on `texts` of a model of the server at `url`.

    `url` is the part before /models and /completions, and mostly ends in /v1. OPENAI_API_KEY is
    sent if it is set. `tokenizer` is the directory of the model's tokenizer.json, or the model's id
    on the Hub, of which no weights are fetched.
    `served_model_name` may be None if the server has one model. The windows are those of
    `vllm_gac.steps.evaluate.evaluate`. Raises ServerError if the server cannot be reached, has no
    such model, has too short a context, or does not return log probabilities.
    """
    directory = model_directory(tokenizer, revision, weights=False)
    model = _served(url, served_model_name)
    if model.max_model_len is not None and sequence_length >= model.max_model_len:
        raise ServerError(
            f"{url}: {model.id} has a context of {model.max_model_len} tokens, too short for "
            f"windows of {sequence_length} and the one token that it generates; use "
            f"--sequence-length {model.max_model_len - 1}, or less"
        )
    batches = window_batches(directory, texts, length=sequence_length, max_tokens=max_tokens)
    most = _PROMPTS_OF_A_REQUEST
    tokens = [b[at : at + most] for b in batches for at in range(0, len(b), most)]
    bar = tqdm(tokens, desc="evaluate", disable=not progress)
    return exp_of_mean(sum(_negative_log_likelihood(url, model.id, batch) for batch in bar), tokens)


def _served(url: str, name: str | None) -> _Model:
    """The server's model `name`, or its only model if `name` is None."""
    models = ask(url, "/models", None, _Models).data
    names = ", ".join(model.id for model in models)
    if name is None and len(models) != 1:
        raise ServerError(f"{url}: serves {names or 'no model'}; choose by --served-model-name")
    for model in models:
        if name in (None, model.id):
            return model
    raise ServerError(f"{url}: --served-model-name {name}: no such model; it serves {names}")


def _negative_log_likelihood(url: str, name: str, batch: "torch.Tensor") -> float:
    """The loss in nats, summed over the predicted tokens of a batch [windows, length]."""
    windows = batch.tolist()
    # Not every server accepts max_tokens = 0, so that one token is generated.
    request = {"model": name, "prompt": windows, "max_tokens": 1, "temperature": 0}
    request |= {"echo": True, "logprobs": 1}
    answer = ask(url, "/completions", request, _Completion, batch.numel() * _BYTES_OF_A_TOKEN)
    total, found = 0.0, 0
    for choice in answer.choices:
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        predicted = logprobs[1 : batch.shape[1]]
        found += len(predicted)
        for logprob in predicted:
            if logprob is not None and logprob > _ROUNDING:
                raise ServerError(
                    f"{url}: returns {logprob:g} as a log probability, which is never above 0; a "
                    "vLLM server must have --logprobs-mode raw_logprobs, its default"
                )
            total -= math.nan if logprob is None else logprob
    expected = len(windows) * (batch.shape[1] - 1)
    if found != expected:
        raise ServerError(
            f"{url}: {found} log probabilities of {expected} prompt tokens: the server does not "
            "support 'echo' with 'logprobs'"
        )
    return total
