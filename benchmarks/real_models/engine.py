"""An engine that serves a dense or a compressed model in one precision.

It takes a fixed number of bytes for its cache, so that it may start while other processes take and
free memory of the same GPU. torch compiles nothing, so that it starts sooner.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.families import LOAD_FORMAT

_CONTEXT, _STEP_TOKENS = 4096, 2048
# Tokens of the cache for each sequence, on average.
_TOKENS_EACH = 1152
_BYTES = 2  # of an element of the cache, at most
SECONDS = 300  # that an engine may take to start, and for an answer
# Of sampled answers to HumanEval, and tokens of all answers.
SAMPLING = {"temperature": 0.2, "top_p": 0.95}
_ANSWER_TOKENS = 700
# Arguments of vLLM's LLM by the name of a precision: what is quantized to FP8 at the start.
_WEIGHTS = {"quantization": "fp8_per_tensor"}
_CACHE = {"kv_cache_dtype": "fp8"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": _WEIGHTS | _CACHE,
    "fp8 weights": _WEIGHTS,
    "fp8 cache": _CACHE,
    "fp8, first cache bf16": _WEIGHTS | _CACHE | {"kv_cache_dtype_skip_layers": ["0"]},
}


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served.

    Attributes:
        compressed: Whether vllm-gac wrote it.
        precision: Of PRECISIONS.
        own_attention: Whether a dense model has our attention.
    """

    compressed: bool = False
    precision: str = "bf16"
    own_attention: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of vLLM's LLM."""
        options = {"load_format": LOAD_FORMAT if self.compressed else "auto"}
        if self.own_attention:
            options |= {"attention_backend": "GAC"}
        return options | PRECISIONS[self.precision]


def complete(engine: Engine, prompts: list[str], **sampling: Any) -> list[tuple[str, int, bool]]:
    """Each answer of an engine, its tokens, and whether it ended by itself."""
    answers: list[tuple[str, int, bool]] = engine.ask(
        _complete, seconds=SECONDS, prompts=prompts, **sampling
    )
    return answers


def _complete(llm: Any, prompts: list[str], **sampling: Any) -> list[tuple[str, int, bool]]:
    """In the engine's process."""
    from vllm import SamplingParams

    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    how = SamplingParams(max_tokens=_ANSWER_TOKENS, **sampling)
    outputs = llm.chat(asked, how, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(a.text, len(a.token_ids), a.finish_reason == "stop") for a in answers]


@contextmanager
def serving(name: str, model: Path, how: Serving, log: Path, *, sequences: int) -> Iterator[Engine]:
    """The engine, of at most so many sequences at a time; it ends with the block."""
    elements = open_checkpoint(model).layout.kv_elements
    with closing(Engine(name, log, VLLM_ENABLE_V1_MULTIPROCESSING="0")) as engine:
        engine.start(
            model=f"{model}",
            max_model_len=_CONTEXT,
            max_num_seqs=sequences,
            max_num_batched_tokens=_STEP_TOKENS,
            gpu_memory_utilization=0.02,  # what must be free at the start
            kv_cache_memory_bytes=_BYTES * elements * _TOKENS_EACH * max(sequences, 8),
            enable_prefix_caching=False,
            enforce_eager=True,
            seed=0,
            **how.options(),
        )
        yield engine
