"""Which models run without torch.compile: those whose layers differ.

vLLM cuts a model at its attention ops and compiles each distinct piece, which takes seconds; of a
dense model that is one piece for all layers, of a compressed one a piece for every two neighbours
of other dims. Breakable CUDA graphs, vLLM's default for several architectures of its own, capture
the same kernels with nothing compiled: what Inductor would fuse here are norms, activations and
rotations, and there are kernels for each.
"""

import os
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_gac.layout import ModelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_SWITCH = "VLLM_USE_BREAKABLE_CUDAGRAPH"
# vLLM's own, and on from there in what a GEMM's tile takes at no cost.
_CAPTURED_TOKENS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(640, 2049, 128)]


def choose_cuda_graphs(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Switch breakable CUDA graphs on where they save start-up, unless the user decided.

    In the process that makes the config, before vLLM looks at the switch; workers inherit it.
    """
    decided = _SWITCH in os.environ or vllm_config.compilation_config.mode is not None
    if decided or vllm_config.model_config.enforce_eager or not current_platform.is_cuda():
        return
    pieces = distinct_pieces(layout)
    if pieces == 1:
        return
    os.environ[_SWITCH] = "1"
    logger.info(
        "Layers of %d kinds: not compiled, but captured in breakable CUDA graphs; %s=0 compiles",
        pieces,
        _SWITCH,
    )
    _capture_prompts(vllm_config)


def distinct_pieces(layout: ModelLayout) -> int:
    """How many graphs torch.compile would have to compile between attentions.

    A piece is one layer's MLP and the next layer's projections.
    """
    sections = [repr(layer.section()) for layer in layout.layers]
    return max(len(set(pairwise(sections))), 1)


def _capture_prompts(vllm_config: "VllmConfig") -> None:
    """Capture steps of up to 2048 tokens, where vLLM's default ends at 512.

    Past them every kernel is launched from Python, compiled or not, and until a step has some
    2000 tokens a GPU is done sooner than that. The sizes of drafts are left to vLLM.
    """
    graphs = vllm_config.compilation_config
    choices: tuple[object, ...] = (
        graphs.cudagraph_mode,
        graphs.cudagraph_capture_sizes,
        graphs.max_cudagraph_capture_size,
        vllm_config.speculative_config,
    )
    if all(choice is None for choice in choices):
        most = vllm_config.scheduler_config.max_num_batched_tokens
        graphs.cudagraph_capture_sizes = [size for size in _CAPTURED_TOKENS if size <= most]
