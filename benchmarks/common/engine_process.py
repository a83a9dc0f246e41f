"""vLLM's engine in a process of its own, asked by JSON lines.

Several start side by side; what is asked of one while the others wait has the GPU for itself.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engine_batches import generate


class EngineError(RuntimeError):
    """An engine died or refused; the message is its own."""


class Engine:
    """Starts at once; the first `ask` waits until it is up."""

    def __init__(self, name: str, logs: Path, **options: Any) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name, self._log = name, logs / f"{name.replace(' ', '-')}.log"
        read, write = os.pipe()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(write), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                text=True,
                env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            )
        os.close(write)
        self._answers = os.fdopen(read)
        self.facts: dict[str, Any] | None = None
        self._died: EngineError | None = None

    def wait(self) -> dict[str, Any]:
        """What the engine is, once it is up. Raises EngineError."""
        if self.facts is None:
            self.facts = self._answer()
            print(f"{self.name}: up after {self.facts['seconds']:.0f} s", flush=True)
        return self.facts

    def ask(self, what: str, **arguments: Any) -> Any:
        """The result of the function `what` below. Raises EngineError."""
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        if self._died is not None:
            raise self._died
        line = self._answers.readline()
        answer = json.loads(line) if line else {"error": self._log.read_text()[-500:]}
        if "error" in answer:
            self._died = EngineError(answer["error"])
            raise self._died
        return answer["result"]

    def close(self) -> None:
        """End the process, and with it what it holds of the GPU."""
        self._process.kill()
        self._process.wait()
        self._answers.close()


# ---- within the engine's process -------------------------------------------------------------


def main(write: int, options: dict[str, Any]) -> None:
    """Start, say what came up, then answer what is asked."""
    from vllm import LLM

    answers = os.fdopen(write, "w")

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    start = time.monotonic()
    try:
        llm = LLM(**options)
        answer({"result": facts(llm) | {"seconds": time.monotonic() - start}})
        for line in sys.stdin:
            what, arguments = json.loads(line)
            answer({"result": ASKED[what](llm, **arguments)})
    except Exception as e:
        answer({"error": f"{type(e).__name__}: {e}"[:800]})
        raise


def facts(llm: Any) -> dict[str, Any]:
    """Of the engine, once it is up."""
    config = llm.llm_engine.vllm_config
    return llm.collective_rpc(_worker_facts)[0] | {
        "kv_tokens": config.cache_config.kv_cache_size_tokens,
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
        "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }


def _worker_facts(worker: Any) -> dict[str, Any]:
    """Attention backends, how linears are multiplied, and the sides of linears, each once."""
    from vllm.model_executor.layers.linear import LinearBase

    layers = worker.get_model().model.layers
    linears = [m for m in layers.modules() if isinstance(m, LinearBase)]
    sides = {size for m in linears for size in (m.input_size, m.output_size)}
    return {
        "attention": sorted({layer.self_attn.attn.attn_backend.get_name() for layer in layers}),
        "linears": sorted({type(m.quant_method).__name__ for m in linears}),
        "sides": sorted(sides),
    }


def throughput(llm: Any, prompts: int, length: int, output: int, runs: int) -> list[float]:
    """Seconds of each run of a batch of random prompts, after one that is not counted."""
    generate(llm, prompts, length, min(output, 8), "warm-up")
    return [generate(llm, prompts, length, output, run)[1] for run in range(runs)]


def score(llm: Any, windows: list[list[int]]) -> list[float]:
    """The logprob of every token of the windows but the first of each."""
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
    """The logprob of each token of the windows after `every` others, one request each.

    With an adapter, vLLM on a CPU cannot say the logprobs of a prompt.
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


def complete(llm: Any, prompts: list[list[int]], output: int) -> list[Any]:
    """Of each prompt greedily: tokens, their logprobs, and how much of it was cached."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, logprobs=0)
    completed = llm.generate(_prompts(prompts), sampling, use_tqdm=False)
    return [
        {
            "tokens": list(answer.token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            "cached": request_output.num_cached_tokens,
        }
        for request_output in completed
        for answer in request_output.outputs
    ]


def sleep(llm: Any, level: int) -> int:
    """Go to sleep; bytes of the GPU that this frees."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    return torch.cuda.mem_get_info()[0] - before


def wake(llm: Any, level: int) -> None:
    """Wake up; from level 2 with the weights read again."""
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def reload(llm: Any) -> None:
    """Read the weights again, and forget what was computed with the old ones."""
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()


def forget_prefixes(llm: Any) -> bool:
    """Empty the prefix cache on the GPU; what a connector moved elsewhere stays there."""
    return llm.reset_prefix_cache()


def drafts(llm: Any) -> dict[str, float]:
    """Tokens that were drafted, and that were accepted, so far."""
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        name: counts.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("draft", "accepted")
    }


def _prompts(tokens: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in tokens]


ASKED = {
    function.__name__: function
    for function in (
        throughput,
        score,
        score_next,
        complete,
        sleep,
        wake,
        reload,
        forget_prefixes,
        drafts,
    )
}


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
