"""Perplexity of a model directory on text files, computed by vLLM in this process.

The predicted tokens are those of `perplexity.py`. Loader, kernels, KV cache and dtype are those of
a server.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.reference_model import refuse_unknown_tokens
from vllm_gac.layout.families import LOAD_FORMAT
from vllm_gac.steps.evaluate.perplexity import (
    DEFAULT_SEQUENCE_LENGTH,
    Perplexity,
    checked,
    exp_of_mean,
    window_batches,
)
from vllm_gac.steps.in_process_engine import InProcessEngine, in_process_engine, require_vllm
from vllm_gac.texts.tokenizer import ModelTokenizer

# Tokens of one step. vLLM keeps several copies of their logits in fp32 beside the model.
_STEP_TOKENS = 2048
# About how many tokens run at once. The KV cache has room for all of them; its blocks have at most
# 128 tokens.
_RUNNING_TOKENS, _BLOCK = 4096, 128


def evaluate_engine(
    model: str | Path,
    texts: Sequence[str | Path],
    *,
    revision: str | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    progress: bool = False,
) -> Perplexity:
    """The perplexity of `model` on `texts`, by vLLM in this process.

    The windows are those of `perplexity.py`. `quantization` and `kv_cache_dtype` are vLLM's
    options. vLLM keeps its memory until the process ends, so call this once per process. Raises
    ModuleNotFoundError without vLLM, and CheckpointError if vLLM cannot run `model`.
    """
    require_vllm()  # before the model is read
    model = model_directory(model, revision)
    checkpoint = checked(model)
    length = min(sequence_length, checkpoint.config.max_position_embeddings)
    tokens, by_text = window_batches(
        ModelTokenizer(model), texts, length=length, max_tokens=max_tokens
    )
    for batch in tokens:
        refuse_unknown_tokens(checkpoint.layout, batch)
    with in_process_engine(
        model,
        progress=progress,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **_engine_arguments(checkpoint, length),
    ) as engine:
        bar = tqdm(tokens, desc="evaluate", disable=not progress)
        losses = [_negative_log_likelihood(engine, batch) for batch in bar]
    return Perplexity(*exp_of_mean(sum(losses), tokens), by_text)


def _engine_arguments(checkpoint: Checkpoint, length: int) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`, with no more KV cache than windows of `length` tokens need."""
    sequences = max(1, _RUNNING_TOKENS // length)
    cached_tokens = sequences * (length + 1 + _BLOCK) + _BLOCK
    overrides = {}
    if length == checkpoint.config.max_position_embeddings:
        # vLLM requires room for the one token that it generates after a prompt.
        overrides["max_position_embeddings"] = length + 1
    return {
        "load_format": LOAD_FORMAT,
        # As with the reference model, NaN weights make a NaN perplexity.
        "model_loader_extra_config": {"finite_check": False},
        "hf_overrides": overrides,
        "max_model_len": length + 1,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": _STEP_TOKENS,
        "gpu_memory_utilization": 0.01,  # the share that must be free at the start, and no more
        "kv_cache_memory_bytes": cached_tokens * checkpoint.layout.kv_elements * 4,  # fp32 at most
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }


def _negative_log_likelihood(engine: InProcessEngine, batch: torch.Tensor) -> float:
    """The loss in nats of a batch of windows [windows, length], over predicted tokens."""
    score = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
    return -sum(
        float(step[token].logprob)
        for output in engine.generate(batch.tolist(), **score)
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    )
