"""Batches of random prompts for vLLM's LLM, and how long their answers take."""

import random
import time
from typing import Any


def generate(llm: Any, prompts: int, length: int, output: int, seed: object) -> tuple[Any, float]:
    """Answer random prompts.

    Args:
        llm: The engine.
        prompts: How many prompts.
        length: Tokens of each prompt.
        output: Tokens of each answer.
        seed: Another seed makes other prompts, so that no prefix is cached.

    Returns:
        vLLM's outputs, and the seconds from the first prompt to the last answer.

    Raises:
        RuntimeError: An answer is missing or has another length.
    """
    shape = f"{prompts}x{length}->{output}"
    return answer(
        llm, [random_tokens(llm, length, f"{shape} {i} {seed}") for i in range(prompts)], output
    )


def random_tokens(llm: Any, count: int, seed: str) -> list[int]:
    """Random token ids of the model's vocabulary; the same for the same seed."""
    rng = random.Random(seed)
    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return [rng.randrange(words) for _ in range(count)]


def answer(llm: Any, prompts: list[list[int]], output: int) -> tuple[Any, float]:
    """Answer `prompts` with `output` tokens each, as `generate` does."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if [len(one.outputs[0].token_ids) for one in outputs] != [output] * len(prompts):
        raise RuntimeError(f"{len(prompts)} prompts: answers of another length than {output}")
    return outputs, seconds


def decode_seconds(outputs: Any) -> float:
    """Seconds from the last request's first token to the last token of all.

    Every step in this time decodes. The engine must run with disable_log_stats=False.
    """
    stats = [output.metrics for output in outputs]
    last = max(request.last_token_ts for request in stats)
    return float(last - max(request.first_token_ts for request in stats))
