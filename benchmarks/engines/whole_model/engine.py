"""One model in one process: starts vLLM with its defaults, times batches, writes what it saw.

Begins when it is given a line on standard input; see __main__.py.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engine_batches import decode_seconds, generate
from benchmarks.engines.whole_model.models import SHAPES, Batch
from benchmarks.engines.whole_model.trace import kernel_times
from vllm_gac.checkpoint.atomic_files import write_json


def main() -> None:
    """Wait, start, time the batches, write OUT once all is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--options", help="JSON of --model-loader-extra-config; dense without")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--engine", default="{}", help="JSON of more arguments of LLM(...)")
    parser.add_argument("--batches", type=int, default=0, help="how many of the shape's to time")
    parser.add_argument("--beside-others", action="store_true", help="take little GPU memory")
    args = parser.parse_args()

    from vllm import LLM

    # So that the files of vLLM are read while the model before is still being timed.
    if not sys.stdin.readline():
        sys.exit("nobody said go")
    shape = SHAPES[args.shape]
    settings: dict[str, Any] = {"load_format": "dummy"}
    if args.options:
        settings = {"load_format": "gac", "model_loader_extra_config": json.loads(args.options)}
    if args.beside_others:
        # Neither is part of the key under which compiled code is cached.
        settings |= {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    compiled_before = Path(os.environ["TRITON_CACHE_DIR"]).exists()
    begun = time.perf_counter()
    llm = LLM(
        str(args.directory),
        skip_tokenizer_init=True,
        disable_log_stats=False,  # requests then say when their tokens came
        seed=0,
        **settings | shape.engine | json.loads(args.engine),
    )
    startup = time.perf_counter() - begun
    llm.collective_rpc(_watch_compilations)
    # What is compiled only now, a first user waits for.
    first = _generate(llm, Batch(2, 300, 4), 0)["seconds"]
    startups = {
        "compiled_before": compiled_before,
        "startup_seconds": startup,
        "first_answer_seconds": first,
    }
    result = {**startups, **_facts(llm), "batches": {}}
    for batch in shape.batches[: args.batches]:
        short = Batch(min(batch.prompts, 16), batch.length, min(batch.output, 8))
        _generate(llm, short, -1)
        runs = [_generate(llm, batch, run) for run in range(batch.runs)]
        result["batches"][batch.name] = runs
        print(batch.name, [round(run["seconds"], 3) for run in runs], flush=True)
    result["compiled_after_startup"] = llm.collective_rpc(_compilations)[0]
    if args.batches >= 4 and llm.llm_engine.vllm_config.device_config.device_type == "cuda":
        result["kernels"] = kernel_times(llm, shape.batches[:4])
    write_json(args.out, result)


def median(runs: list[dict[str, float]], key: str) -> float:
    """Of what the runs of one batch say for `key`."""
    return statistics.median(run[key] for run in runs)


def _generate(llm: Any, batch: Batch, seed: int) -> dict[str, float]:
    outputs, seconds = generate(llm, batch.prompts, batch.length, batch.output, seed)
    return {"seconds": seconds, "decode_seconds": decode_seconds(outputs)}


def _facts(llm: Any) -> dict[str, Any]:
    """Of the engine, once it is up."""
    import torch
    import triton
    import vllm

    cache = llm.llm_engine.vllm_config.cache_config
    available, backends, compiling = llm.collective_rpc(_worker_facts)[0]
    return {
        "torch_compile_seconds": compiling,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {m.__name__: m.__version__ for m in (vllm, torch, triton)},
        "attention": {name: backends.count(name) for name in sorted(set(backends))},
        "kv_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "kv_bytes_available": available or cache.kv_cache_memory_bytes,
    }


# The rest runs in the worker.


def _worker_facts(worker: Any) -> tuple[int | None, list[str], float]:
    """Bytes left for the cache, the attention backend of each layer, seconds in torch.compile."""
    layers = worker.get_model().model.layers
    backends = [layer.self_attn.attn.attn_backend.get_name() for layer in layers]
    available = getattr(worker, "available_kv_cache_memory_bytes", None)
    return available, backends, worker.vllm_config.compilation_config.compilation_time


def _watch_compilations(worker: Any) -> None:
    """From now on, note every kernel that Triton compiles, or reads from its cache on disk."""
    import triton

    worker.compiled_kernels = []

    def note(*, fn: Any, **_: Any) -> None:
        worker.compiled_kernels.append(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = note


def _compilations(worker: Any) -> list[str]:
    return sorted(worker.compiled_kernels)


if __name__ == "__main__":
    main()
