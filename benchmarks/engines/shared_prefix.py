"""Many requests that share a long prefix and add a little: memory, and whether all are answered.

    python -m benchmarks.engines.shared_prefix OUT [--device cuda] [--commit ...]

Each model of Llama-3-8B's shape in a process of its own, random weights, vLLM's defaults: a prompt
of 100,000 tokens, then 64 requests at once that repeat it and add 100 tokens; and 80 over 120,000.
Without a bound a step would gather all those contexts. Writes OUT/shared_prefix.json and .md; fails
if a request is not answered. On a CPU (--small) it shows that everything runs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engine_batches import answer, random_tokens
from benchmarks.common.markdown import markdown
from benchmarks.common.provenance import arguments, provenance, save
from benchmarks.engines.whole_model.models import SHAPES, models

MODELS = ("heads-96-64", "latent-64")
ADDED, ANSWER = 100, 8
# (tokens of the prefix, requests)
WAVES, SMALL_WAVES = ((100_000, 64), (120_000, 80)), ((100, 4), (200, 6))
LONGEST, SMALL_LONGEST = 131_072, 512


def main() -> None:
    """Every model after the other, or the one of --model in this process."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/shared_prefix"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--model", choices=MODELS, help="only this one, in this process")
    args = parser.parse_args()
    if args.model:
        args.work.mkdir(parents=True, exist_ok=True)
        _said(args).write_text(json.dumps(_measure(args)))
        return
    begun, rows = time.monotonic(), []
    for args.model in MODELS:
        # One process: all requests are there before the first step, which is the worst case.
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-m", "benchmarks.engines.shared_prefix", str(args.out)]
        command += ["--work", str(args.work), "--model", args.model, "--small"]
        subprocess.run(command if args.small else command[:-1], env=environment, check=True)
        rows += json.loads(_said(args).read_text())
    # Only now, as PyTorch would take GPU memory beside the engines.
    command_line = f"python -m benchmarks.engines.shared_prefix OUT --device {args.device}"
    about = provenance(command_line, args) | {"seconds": round(time.monotonic() - begun)}
    save(args.out, "shared_prefix", about | {"rows": rows}, page)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    about = (
        f"{result['machine']}, {result['date']}, commit {result['commit']}, PyTorch "
        f"{result['torch']}, `{result['command']}`, {result['seconds']} s in all."
    )
    explained = (
        f"Llama-3-8B's shape with random weights, vLLM's defaults and {LONGEST:,} tokens of "
        f"context. One prompt of so many tokens, then so many requests at once that repeat it and "
        f"add {ADDED} tokens, each answered with {ANSWER}. MiB: what PyTorch held in the requests' "
        "largest step beside weights, cache and CUDA graphs, what vLLM had left free for a step, "
        "what PyTorch had taken from the GPU by then, and what all processes had."
    )
    lines = ["# A long prefix that many requests share", "", about, explained, ""]
    return "\n".join([*lines, *markdown(result["rows"]), ""])


def _said(args: argparse.Namespace) -> Path:
    return Path(args.work / f"{args.model}.json")


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each wave of requests."""
    from vllm import LLM

    longest = SMALL_LONGEST if args.small else LONGEST
    shape = SHAPES["tiny" if args.small else "llama3-8b"]
    dense = shape.dense | {"max_position_embeddings": longest}
    # Of another shape the sizes in a name are scaled.
    model = models(dense)[[of.name for of in models(SHAPES["llama3-8b"].dense)].index(args.model)]
    model.write(args.work / args.model)
    llm = LLM(
        str(args.work / args.model),
        skip_tokenizer_init=True,
        load_format="gac",
        model_loader_extra_config=model.options,
        max_model_len=longest,
        seed=0,
        **shape.engine,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    left_free = llm.collective_rpc(_left_free)[0]
    answer(llm, [random_tokens(llm, ADDED, "warm")], ANSWER)
    rows, text = [], random_tokens(llm, longest, "prefix")
    for prefix, requests in SMALL_WAVES if args.small else WAVES:
        _, first = answer(llm, [text[:prefix]], ANSWER)
        held = llm.collective_rpc(_start)[0]
        prompts = [text[:prefix] + random_tokens(llm, ADDED, f"own {i}") for i in range(requests)]
        outputs, seconds = answer(llm, prompts, ANSWER)
        most, taken, in_use = llm.collective_rpc(_most)[0]
        row = {
            "model": args.model,
            "cache tokens": cache.num_gpu_blocks * cache.block_size,
            "prefix": prefix,
            "requests": requests,
            "answered": len(outputs),
            "cached tokens of a request": min(output.num_cached_tokens for output in outputs),
            "prefix s": round(first, 2),
            "requests s": round(seconds, 2),
            "held MiB": (most - held) >> 20,
            "left free MiB": left_free >> 20,
            "PyTorch MiB": taken >> 20,
            "in use MiB": in_use >> 20,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


# The rest runs in the worker.


def _left_free(worker: Any) -> int:
    """Bytes that vLLM left beside weights and cache for what a step holds."""
    return int(getattr(worker, "peak_activation_memory", 0))


def _start(worker: Any) -> int:
    """Bytes that are held between steps; the most that is held is counted from here on."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _most(worker: Any) -> tuple[int, int, int]:
    """The most that was held, what PyTorch has of the GPU, and what all processes have of it."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free


if __name__ == "__main__":
    main()
