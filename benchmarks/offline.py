"""Random prompts through vLLM's LLM, all at once, and how long it took."""

import random
import time
from typing import Any


def generate(llm: Any, prompts: int, length: int, output: int, seed: object) -> tuple[Any, float]:
    """What vLLM answers to so many prompts of `length` tokens, `output` tokens each, and seconds.

    Another `seed` makes other prompts, so that no prefix is cached. Raises RuntimeError if an
    answer is of another length.
    """
    from vllm import SamplingParams

    asked = f"{prompts}x{length}->{output}"
    rng = random.Random(f"{asked} {seed}")
    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    batch = [
        {"prompt_token_ids": [rng.randrange(words) for _ in range(length)]} for _ in range(prompts)
    ]
    sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if any(len(answer.outputs[0].token_ids) != output for answer in outputs):
        raise RuntimeError(f"{asked}: answers of another length than asked for")
    return outputs, seconds


def decode_seconds(outputs: Any) -> float:
    """From the first token of the last prompt to the last token of all: every step decodes.

    The engine must have been started with disable_log_stats=False.
    """
    stats = [output.metrics for output in outputs]
    last = max(request.last_token_ts for request in stats)
    return float(last - max(request.first_token_ts for request in stats))
