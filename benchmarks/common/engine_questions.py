"""What the benchmarks ask an engine: functions of vLLM's LLM whose arguments and results are plain.

`engine_process.Engine.ask` calls them in the engine's process.
"""

import random
import time
from typing import Any

from benchmarks.common.page import machine


def facts(llm: Any) -> dict[str, Any]:
    """What the engine is.

    Returns:
        The machine and versions, as in a page's provenance; `kv_tokens`, how many tokens fit into
        the cache.
    """
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        **machine(config.device_config.device_type),
        "vllm": vllm.__version__,
        "kv_tokens": config.cache_config.kv_cache_size_tokens,
    }


def batch_seconds(
    llm: Any, prompts: int, length: int, output: int, seed: object
) -> dict[str, float]:
    """Seconds of one batch of random prompts, and of its decoding alone.

    The engine must run with disable_log_stats=False: requests then record when tokens came.

    Args:
        llm: The engine.
        prompts: How many prompts.
        length: Tokens of each prompt.
        output: Tokens of each answer.
        seed: Another seed makes other prompts, so that no prefix is cached.

    Raises:
        RuntimeError: An answer is missing or has another length.
    """
    from vllm import SamplingParams

    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    batch = []
    for number in range(prompts):
        rng = random.Random(f"{prompts}x{length}->{output} {number} {seed}")
        batch.append({"prompt_token_ids": [rng.randrange(words) for _ in range(length)]})
    sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(batch, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    if [len(one.outputs[0].token_ids) for one in outputs] != [output] * prompts:
        raise RuntimeError(f"{prompts} prompts: answers of another length than {output}")
    # From the last request's first token to the last token of all, every step decodes.
    stats = [one.metrics for one in outputs]
    decode_seconds = max(s.last_token_ts for s in stats) - max(s.first_token_ts for s in stats)
    return {"seconds": seconds, "decode_seconds": float(decode_seconds)}
