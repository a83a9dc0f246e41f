"""On a GPU gac models run in breakable CUDA graphs, without torch.compile unless it is asked for.

vLLM cuts a model at its attention ops and compiles each distinct piece, which takes seconds; of a
dense model that is one piece for all layers, of a compressed one a piece for every two neighbours
of other dims. Breakable CUDA graphs, vLLM's default for several architectures of its own, capture
the same kernels with nothing compiled: what Inductor would fuse here are norms, activations and
rotations, and there are kernels for each. Ours rotates and caches in one (kernels/rotary.py), which
Inductor cannot.
"""

import os
import sys
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import vllm_lib

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_SWITCH = "VLLM_USE_BREAKABLE_CUDAGRAPH"
_ATTENTION = "vllm.model_executor.layers.attention.attention"
# vLLM's own, and on from there in what a GEMM's tile takes at no cost.
_CAPTURED_TOKENS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(640, 2049, 128)]


def choose_cuda_graphs(vllm_config: "VllmConfig") -> None:
    """Switch breakable CUDA graphs on, unless the user decided.

    In the process that makes the config, before vLLM looks at the switch; workers inherit it.
    """
    decided = _SWITCH in os.environ or vllm_config.compilation_config.mode is not None
    if vllm_config.model_config.enforce_eager or not current_platform.is_cuda():
        return
    if not decided:
        os.environ[_SWITCH] = "1"
        logger.info("Not compiled, but captured in breakable CUDA graphs; %s=0 compiles", _SWITCH)
        _capture_prompts(vllm_config)
    break_graphs_at_attention()


def break_graphs_at_attention() -> None:
    """Have vLLM's attention op break graphs, if it was imported before they were switched on.

    vLLM looks at the switch when it imports the op. Workers that are forked off this process would
    else capture the attention of a dummy batch, and replay that in every mixed step.
    """
    if _ATTENTION not in sys.modules:
        return
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import attention

    op = attention.unified_attention_with_output
    breaks = op.__globals__["__name__"] == breakable_cudagraph.__name__
    if breakable_cudagraph.is_breakable_cudagraph_enabled() and not breaks:
        op = breakable_cudagraph.eager_break_during_capture(op)
        attention.unified_attention_with_output = op
        name, key = op.__name__, current_platform.dispatch_key
        vllm_lib.impl(name, op, dispatch_key=key, allow_override=True)


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
