"""Runs a function that uses vLLM's engine in a process of its own."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.serving.agreement import PROMPTS
from tests.serving.server import Answers
from tests.support.processes import run_in_process

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: the function sees worker and model
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
# fp32, so that outputs that should be equal differ only in the last bits.
OPTIONS: dict[str, Any] = {
    "load_format": "gac",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "disable_log_stats": True,
}
# For a GPU: vLLM's defaults with CUDA graphs, but little memory and few graphs.
GPU_OPTIONS: dict[str, Any] = OPTIONS | {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.2,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
}
# One thread per rank, which the system places: vLLM would need a NUMA node for each rank.
CPU_RANKS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# In eager mode vLLM 0.32 for CPU skips the profiling run, in which a later pipeline stage allocates
# buffers for the hidden states that it receives. With tracing, but no compilation, it does not skip
# it.
_TRACED = {
    "enforce_eager": False,
    "compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"},
}
_HERE = Path(__file__).parent


def in_engine_process(function: Callable[..., Any], *arguments: Any, **env: str) -> Any:
    """The result of `function(*arguments)` in a new process; see `run_in_process`."""
    return each_in_engine_process(function, [arguments], **env)[0]


def each_in_engine_process(
    function: Callable[..., Any], calls: Iterable[Sequence[Any]], **env: str
) -> Any:
    """As `in_engine_process`, for several calls, one after the other in one new process."""
    return run_in_process(function, calls, ENVIRONMENT | env)


def answers(llm: Any, prompts: list[list[int]] = PROMPTS, tokens: int = 12) -> Answers:
    """Greedy answers of `llm` to prompts of token ids."""
    return [answer(output) for output in outputs(llm, prompts, tokens)]


def described(
    model: str, options: dict[str, Any], then: Callable[[Any], None] = lambda llm: None
) -> dict[str, Any]:
    """Answers, those of cached prompts, and how a model is served. `then` gets the engine."""
    from vllm import LLM

    llm = LLM(model, **options)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    strides = [layer.kv_cache.stride() for layer in layers]
    said = {
        "answers": [answers(llm), answers(llm)],
        "attention": sorted({type(layer.impl).__name__ for layer in layers}),
        "cached bytes": sorted({layer.kv_cache.element_size() for layer in layers}),
        "heads first": all(stride[1] > stride[2] for stride in strides),
    }
    then(llm)
    return said


def served(directory: str, engine: dict[str, Any] | None = None) -> list[Any]:
    """The answers of a model by an `engine` of these options, its blocks, and a block's tokens."""
    from vllm import LLM

    llm = LLM(directory, **OPTIONS | (engine or {}))
    cache = llm.llm_engine.vllm_config.cache_config
    return [answers(llm), cache.num_gpu_blocks, cache.block_size]


def served_by_ranks(model: Path, **engine: Any) -> tuple[Answers, int]:
    """The answers of an engine with these ranks on a CPU, and the tokens in its cache."""
    ranks = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    if "pipeline_parallel_size" in engine:
        engine |= _TRACED
    path = os.pathsep.join(filter(None, (str(_HERE / "ray_on_cpu"), os.environ.get("PYTHONPATH"))))
    ray = {
        "PYTHONPATH": path,
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": ranks}),
        "RAY_worker_niceness": "0",  # of 15 by default: starved where something else runs
    }
    answered, blocks, block_size = in_engine_process(served, str(model), engine, **CPU_RANKS, **ray)
    return answered, blocks * block_size


def answer(output: Any) -> tuple[list[int], list[dict[str, float]]]:
    """The tokens and logprobs of one of vLLM's RequestOutputs."""
    completion = output.outputs[0]
    top = [{str(t): p.logprob for t, p in step.items()} for step in completion.logprobs]
    return list(completion.token_ids), top


def outputs(
    llm: Any,
    prompts: list[list[int]] = PROMPTS,
    tokens: int = 12,
    lora_request: Any = None,
    transfers: list[dict[str, Any]] | None = None,
) -> Any:
    """vLLM's RequestOutput for each prompt: greedy tokens, with the top-5 logprobs.

    `transfers` are vLLM's `kv_transfer_params` of each prompt.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=5,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        for transfer in transfers or [None] * len(prompts)
    ]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, sampling, use_tqdm=False, lora_request=lora_request)


def assert_same(actual: Answers, expected: Answers, error: float = 2e-3) -> None:
    """Check that tokens are equal and logprobs differ by less than `error`."""
    for (tokens, top), (expected_tokens, expected_top) in zip(actual, expected, strict=True):
        assert tokens == expected_tokens
        for step, expected_step in zip(top, expected_top, strict=True):
            for token in step.keys() & expected_step.keys():
                assert abs(step[token] - expected_step[token]) < error
            assert len(step.keys() & expected_step.keys()) >= 4


def scored_prompts(llm: Any) -> list[float]:
    """The logprobs of all tokens of PROMPTS, but of the first of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [
        step[token].logprob
        for output in llm.generate(prompts, sampling, use_tqdm=False)
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]


def cache_scales(worker: Any) -> list[list[float]]:
    """The scales of keys, then of values, of each layer. Runs in the worker."""
    layers = [layer.self_attn.attn for layer in worker.get_model().model.layers]
    return [[*x._k_scale.reshape(-1).tolist(), *x._v_scale.reshape(-1).tolist()] for x in layers]


def linear_methods(worker: Any) -> list[str]:
    """The quantization methods of the last layer's linears. Runs in the worker."""
    from vllm.model_executor.layers.linear import LinearBase

    linears = worker.get_model().model.layers[-1].modules()
    return sorted({type(m.quant_method).__name__ for m in linears if isinstance(m, LinearBase)})
