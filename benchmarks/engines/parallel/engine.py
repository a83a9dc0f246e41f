"""One engine in a process of its own: starts, waits for its turn, measures, writes what it saw.

python -m benchmarks.engines.parallel.engine JOB.json (written by __main__.py)
"""

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common.engine_batches import decode_seconds, generate
from benchmarks.engines.parallel.models import SHAPES, Batch
from vllm_gac import demo
from vllm_gac.checkpoint.atomic_files import write_json

TEXT_TOKENS, WINDOW = 3600, 900
PROMPTS = ("def __init__(self", "import os\n", "class Node:\n", "    for i in range(", "try:\n")
COMPLETED = 64


def main(job: dict[str, Any]) -> None:
    """Do the `task` of the job; OUT.up says that the engine is ready, and it waits for OUT.go."""
    from vllm import LLM

    out, started = Path(job["out"]), time.time()
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    if job["options"] is not None:
        settings |= {"load_format": "gac", "model_loader_extra_config": job["options"]}
    elif job["task"] == "tokens":
        settings["load_format"] = "auto"
    llm = LLM(
        job["model"],
        tensor_parallel_size=job["tp"],
        gpu_memory_utilization=0.05,  # what must be free at the start; others are on the GPU, too
        kv_cache_memory_bytes=job["cache_bytes"],
        enable_prefix_caching=False,
        disable_log_stats=False,  # requests then say when their tokens came
        seed=0,
        **settings | job["engine"],
    )
    facts = {"startup_seconds": time.time() - started, **_facts(llm)}
    out.with_suffix(".up").touch()
    while not out.with_suffix(".go").exists():
        time.sleep(0.05)
    measured = _timed(llm, job["shape"]) if job["task"] == "speed" else _answers(llm)
    write_json(out, facts | measured)


def _facts(llm: Any) -> dict[str, Any]:
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "triton": metadata.version("triton"),
        },
        "cache_tokens": config.cache_config.kv_cache_size_tokens,
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
    }


def _timed(llm: Any, shape_name: str) -> dict[str, Any]:
    """Seconds of each repeat: of a whole batch of prompts, and of one step of a decode batch."""
    shape = SHAPES[shape_name]
    found: dict[str, Any] = {}
    for name in ("prefill", "decode"):
        batch: Batch = getattr(shape, name)
        _generate(llm, batch, -1)
        runs = [_generate(llm, batch, repeat) for repeat in range(shape.repeats)]
        found[name] = [run[name] for run in runs]
    return found


def _generate(llm: Any, batch: Batch, seed: int) -> dict[str, float]:
    outputs, seconds = generate(llm, batch.prompts, batch.length, batch.output, seed)
    return {"prefill": seconds, "decode": decode_seconds(outputs) / max(1, batch.output - 1)}


def _answers(llm: Any) -> dict[str, Any]:
    """Logprobs of held-out text, token by token, and greedy completions with their logprobs."""
    from tokenizers import Tokenizer
    from vllm import SamplingParams

    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    text = tokenizer.encode(demo.HELD_OUT.read_text()).ids[:TEXT_TOKENS]
    windows = [{"prompt_token_ids": text[i : i + WINDOW]} for i in range(0, len(text), WINDOW)]
    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    logprobs = [
        step[token].logprob
        for output in llm.generate(windows, score, use_tqdm=False)
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    prompts = [{"prompt_token_ids": tokenizer.encode(prompt).ids} for prompt in PROMPTS]
    greedy = SamplingParams(
        max_tokens=COMPLETED, temperature=0, ignore_eos=True, logprobs=5, detokenize=False
    )
    completions = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "top": [[[t, p.logprob] for t, p in s.items()] for s in output.outputs[0].logprobs],
        }
        for output in llm.generate(prompts, greedy, use_tqdm=False)
    ]
    return {"text_logprobs": logprobs, "completions": completions}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
