"""Perplexity of a model directory as vLLM serves it, on text files.

The tokens are those of `vllm_gac.steps.evaluate`; loader, kernels, KV cache and dtype are those of
a server.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.reference_model import refuse_unknown_tokens
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.layout.names import LOAD_FORMAT
from vllm_gac.steps.evaluate import DEFAULT_SEQUENCE_LENGTH, checked, exp_of_mean, window_batches

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

# Tokens of a step. Logits of that many, in fp32 and several times over, must fit beside the model.
_STEP_TOKENS = 2048
# Sequences that run at once are of about this many tokens; all of them fit the KV cache, whose
# blocks are of 128 tokens at most.
_RUNNING_TOKENS, _BLOCK = 4096, 128


def perplexity(
    model: Path,
    texts: Sequence[Path],
    *,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    progress: bool = False,
) -> tuple[float, int]:
    """(perplexity, predicted tokens) of `model` on `texts`, by vLLM in this process.

    Windows are those of `vllm_gac.steps.evaluate.perplexity`. On a CPU nothing is compiled; on a
    GPU it runs in CUDA graphs as for a server. vLLM keeps its memory until the process ends: one
    call a process. Raises ModuleNotFoundError without vLLM, and CheckpointError if it cannot run
    `model`.
    """
    _configure_vllm()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    checkpoint = checked(model)
    length = min(sequence_length, checkpoint.config.max_position_embeddings)
    tokens = window_batches(model, texts, length=length, max_tokens=max_tokens)
    for batch in tokens:
        refuse_unknown_tokens(checkpoint.layout, batch)
    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    eager = current_platform.is_cpu()
    # vLLM's sampler is compiled even where the model is not, which takes a CPU half a minute.
    uncompiled = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
    try:
        with uncompiled:
            arguments = _engine_arguments(checkpoint, length)
            llm = LLM(str(model), enforce_eager=eager, use_tqdm_on_load=progress, **arguments)
            bar = tqdm(tokens, desc="evaluate", disable=not progress)
            total = sum(_negative_log_likelihood(llm, score, batch) for batch in bar)
    except GacError:
        raise
    except Exception as e:  # vLLM raises what it likes; VLLM_LOGGING_LEVEL=INFO tells the story
        raise CheckpointError(f"{model}: vLLM cannot run it ({type(e).__name__}: {e})") from e
    return exp_of_mean(total, tokens)


def _configure_vllm() -> None:
    """What vLLM and PyTorch read from the environment, unless the user has set it."""
    # In one process, errors arrive as they were raised and there is little to start.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the result's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Without it, vLLM leaves one thread to the model.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))


def _engine_arguments(checkpoint: Checkpoint, length: int) -> dict[str, Any]:
    """What vLLM needs to know: no more KV cache than windows of `length` tokens take."""
    sequences = max(1, _RUNNING_TOKENS // length)
    cached_tokens = sequences * (length + 1 + _BLOCK) + _BLOCK
    overrides = {}
    if length == checkpoint.config.max_position_embeddings:
        # vLLM insists on room for the one token that it generates after a prompt.
        overrides["max_position_embeddings"] = length + 1
    return {
        "load_format": LOAD_FORMAT,
        # As by the reference, NaN weights make a NaN perplexity.
        "model_loader_extra_config": {"finite_check": False},
        "hf_overrides": overrides,
        "max_model_len": length + 1,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": _STEP_TOKENS,
        "gpu_memory_utilization": 0.01,  # must be free before the start; of no other effect here
        "kv_cache_memory_bytes": cached_tokens * checkpoint.layout.kv_elements * 4,  # fp32 at most
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }


def _negative_log_likelihood(llm: "LLM", score: "SamplingParams", batch: torch.Tensor) -> float:
    """Sum over the predicted tokens of a batch [windows, length], in nats."""
    prompts = [{"prompt_token_ids": window} for window in batch.tolist()]
    total = sum(
        step[token].logprob
        for output in llm.generate(prompts, score, use_tqdm=False)
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    )
    return -float(total)
