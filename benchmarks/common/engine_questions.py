"""What the benchmarks ask an engine: functions of vLLM's LLM whose arguments and results are plain.

`engine_process.Engine.ask` calls them in the engine's process.
"""

from typing import Any

from benchmarks.common.engine_batches import decode_seconds, generate
from benchmarks.common.page import machine


def facts(llm: Any) -> dict[str, Any]:
    """What the engine is.

    Returns:
        The machine and versions, as in a page's provenance; `attention`, the backend of each layer
        of the first pipeline stage; `linears`, the names of their quantization methods; `sides`,
        the sizes of their inputs and outputs; `kv_tokens`, how many tokens fit into the cache;
        compilation and runner modes.
    """
    import vllm

    config = llm.llm_engine.vllm_config
    (attention, linears, sides) = llm.collective_rpc(_layers)[0]
    return {
        **machine(config.device_config.device_type),
        "vllm": vllm.__version__,
        "device": config.device_config.device_type,
        "attention": attention,
        "linears": linears,
        "sides": sides,
        "kv_tokens": config.cache_config.kv_cache_size_tokens,
        "compilation": str(config.compilation_config.mode),
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
        "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }


def _layers(worker: Any) -> tuple[list[str], list[str], list[int]]:
    """In the worker: the attention backend of each layer; what linears use, and their sizes."""
    from vllm.model_executor.layers.linear import LinearBase

    layers = worker.get_model().model.layers
    linears = [m for m in layers.modules() if isinstance(m, LinearBase)]
    own = [layer for layer in layers if hasattr(layer, "self_attn")]  # of this pipeline stage
    return (
        [layer.self_attn.attn.attn_backend.get_name() for layer in own],
        sorted({type(m.quant_method).__name__ for m in linears}),
        sorted({size for m in linears for size in (m.input_size, m.output_size)}),
    )


def throughput(llm: Any, prompts: int, length: int, output: int, runs: int) -> list[float]:
    """Seconds of each run of a batch of random prompts, after a warm-up that is not counted."""
    generate(llm, prompts, length, min(output, 8), "warm-up")
    return [generate(llm, prompts, length, output, run)[1] for run in range(runs)]


def batch_seconds(
    llm: Any, prompts: int, length: int, output: int, seed: object
) -> dict[str, float]:
    """Seconds of one batch of random prompts, and of its decoding alone.

    The engine must run with disable_log_stats=False: requests then record when tokens came.
    """
    outputs, seconds = generate(llm, prompts, length, output, seed)
    return {"seconds": seconds, "decode_seconds": decode_seconds(outputs)}


def score(llm: Any, windows: list[list[int]]) -> list[float]:
    """The logprob of every token of the windows except the first one of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scored = llm.generate(_prompts(windows), sampling, use_tqdm=False)
    return [
        step[token].logprob
        for output in scored
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]


def score_next(
    llm: Any, windows: list[list[int]], every: int, adapter: str | None = None
) -> list[float]:
    """The logprob of each `every`-th token of the windows, by one request each.

    With an adapter, vLLM on a CPU returns no logprobs of a prompt, so `score` cannot be used.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    ends = [(window, end) for window in windows for end in range(every, len(window), every)]
    sampling = [
        SamplingParams(max_tokens=1, temperature=0, logprobs=0, allowed_token_ids=[window[end]])
        for window, end in ends
    ]
    request = {} if adapter is None else {"lora_request": LoRARequest("adapter", 1, adapter)}
    prompts = _prompts([window[:end] for window, end in ends])
    outputs = llm.generate(prompts, sampling, use_tqdm=False, **request)
    return [
        output.outputs[0].logprobs[0][window[end]].logprob
        for output, (window, end) in zip(outputs, ends, strict=True)
    ]


def complete(
    llm: Any,
    prompts: list[list[int]],
    output: int,
    top: int = 0,
    transfers: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Greedy completions of the prompts.

    Args:
        llm: The engine.
        prompts: Token ids.
        output: Tokens of each completion.
        top: How many of the likeliest tokens of each step to return.
        transfers: vLLM's `kv_transfer_params` of each prompt, of an engine that gives its cache to
            another one, or takes it from there.

    Returns:
        For each prompt `tokens`, their `logprobs`, `top` as [token, logprob] pairs by step,
        `cached`, how many tokens of the prompt came from the cache, and `transfer`, what a KV
        connector returned.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=output,
            temperature=0,
            ignore_eos=True,
            logprobs=top,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        for transfer in transfers or [None] * len(prompts)
    ]
    completed = llm.generate(_prompts(prompts), sampling, use_tqdm=False)
    return [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            "top": [[[token, p.logprob] for token, p in step.items()] for step in answer.logprobs],
            "cached": request_output.num_cached_tokens,
            "transfer": request_output.kv_transfer_params,
        }
        for request_output in completed
        for answer in request_output.outputs
    ]


def sleep(llm: Any, level: int) -> int:
    """Put the engine to sleep; the bytes of GPU memory that this frees."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    return torch.cuda.mem_get_info()[0] - before


def wake(llm: Any, level: int) -> None:
    """Wake the engine up. After level 2, which drops the weights, they are read again."""
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def reload(llm: Any) -> None:
    """Read the weights again, and drop the keys and values computed with the old ones."""
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()


def forget_prefixes(llm: Any) -> bool:
    """Empty the prefix cache on the GPU; copies that a KV connector made elsewhere stay."""
    emptied: bool = llm.reset_prefix_cache()
    return emptied


def drafts(llm: Any) -> dict[str, float]:
    """How many tokens were drafted and how many were accepted so far."""
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        name: counts.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("draft", "accepted")
    }


def _prompts(tokens: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in tokens]
