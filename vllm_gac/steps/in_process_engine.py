"""vLLM's engine in this process, for verbs that have it compute.

vLLM keeps its memory until the process ends, so a process makes one engine.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_gac.errors import CheckpointError, GacError

if TYPE_CHECKING:
    from vllm import LLM


class InProcessEngine:
    """An engine that is up.

    Args:
        model: The model that it runs, for messages.
        llm: The engine.
    """

    def __init__(self, model: Path, llm: "LLM") -> None:
        self._model, self._llm = model, llm

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> Sequence[Any]:
        """vLLM's output for each prompt of token ids, by `SamplingParams(**sampling)`.

        Raises:
            CheckpointError: vLLM fails.
        """
        from vllm import SamplingParams

        given: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with _faults(self._model):
            outputs: list[Any] = self._llm.generate(
                given, SamplingParams(**sampling), use_tqdm=False
            )
        return outputs


def require_vllm() -> bool:
    """Prepare this process for vLLM, before a model is read; return whether it runs on a CPU.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    # In a single process, errors arrive as they were raised, and little has to be started.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the result
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Otherwise vLLM uses one thread for the model.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    from vllm import LLM  # noqa: F401 - names vllm, if it is missing
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextmanager
def in_process_engine(
    model: Path, *, progress: bool, **arguments: Any
) -> Iterator[InProcessEngine]:
    """An engine with vLLM's `LLM(model, **arguments)`.

    On a CPU nothing is compiled; on a GPU the model runs in CUDA graphs, as in a server.

    Raises:
        CheckpointError: vLLM cannot run the model.
    """
    eager = require_vllm()
    from vllm import LLM

    # vLLM compiles its sampler even if the model is not compiled, which takes a CPU half a minute.
    with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
        with _faults(model):
            llm = LLM(f"{model}", enforce_eager=eager, use_tqdm_on_load=progress, **arguments)
        yield InProcessEngine(model, llm)


@contextmanager
def _faults(model: Path) -> Iterator[None]:
    """Name the model in what vLLM raises, which has many types."""
    try:
        yield
    except GacError:  # of our loader
        raise
    except Exception as e:  # VLLM_LOGGING_LEVEL=INFO shows vLLM's log
        raise CheckpointError(f"{model}: vLLM cannot run it ({type(e).__name__}: {e})") from e
