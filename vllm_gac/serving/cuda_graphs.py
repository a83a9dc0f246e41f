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


def distinct_pieces(layout: ModelLayout) -> int:
    """How many graphs torch.compile would have to compile between attentions.

    A piece is one layer's MLP and the next layer's projections.
    """
    sections = [repr(layer.section()) for layer in layout.layers]
    return max(len(set(pairwise(sections))), 1)
