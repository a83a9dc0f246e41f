"""Random prompts through vLLM's LLM, all at once, and how long it took."""

import random
import time
from typing import Any


def generate(llm: Any, prompts: int, length: int, output: int, seed: object) -> tuple[Any, float]:
    """What vLLM answers to so many prompts of `length` tokens, `output` tokens each, and seconds.

    Another `seed` makes other prompts, so that no prefix is cached. Raises RuntimeError if an
    answer is of another length.
    """
    asked = f"{prompts}x{length}->{output}"
    return answer(
        llm, [random_tokens(llm, length, f"{asked} {i} {seed}") for i in range(prompts)], output
    )


def random_tokens(llm: Any, count: int, seed: str) -> list[int]:
    """Token ids of the model's vocabulary."""
    rng = random.Random(seed)
    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return [rng.randrange(words) for _ in range(count)]


def answer(llm: Any, prompts: list[list[int]], output: int) -> tuple[Any, float]:
    """What vLLM answers to `prompts`, `output` tokens each, and seconds.

    Raises RuntimeError if an answer is of another length.
    """
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
    """From the first token of the last prompt to the last token of all: every step decodes.

    The engine must have been started with disable_log_stats=False.
    """
    stats = [output.metrics for output in outputs]
    last = max(request.last_token_ts for request in stats)
    return float(last - max(request.first_token_ts for request in stats))
