"""On a GPU gac models run in breakable CUDA graphs. torch.compile is off by default.

vLLM splits a model at its attention ops and compiles each distinct piece, which takes seconds. A
dense model has one such piece for all its layers. A compressed model has one for every pair of
neighbouring layers whose dims no other pair has.

Breakable CUDA graphs, vLLM's default for several of its own architectures, capture the same kernels
without compiling anything. Inductor would fuse norms, activations and rotations here, and each has
a fused kernel already. Ours rotate and cache in one launch (kernels/rotate_and_cache.py), and
compute gate, up and activation in one launch (kernels/swiglu.py), which Inductor cannot do.
"""

import os
import sys
from typing import TYPE_CHECKING

from vllm import envs
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_gac.serving.vllm_internals import break_graphs_at

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_SWITCH = "VLLM_USE_BREAKABLE_CUDAGRAPH"
# vLLM's attention ops. They break a CUDA graph if they are imported while the switch is on.
_OPS = {
    "vllm.model_executor.layers.attention.attention": "unified_attention_with_output",
    "vllm.model_executor.layers.attention.mla_attention": "unified_mla_attention_with_output",
}
# vLLM's default sizes up to 512, then steps of 128: a GEMM rounds up to such a tile anyway.
_CAPTURED_TOKENS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(640, 2049, 128)]
# Whether we set the switch, for this engine or for one that this process started before.
_switched_on = False


def choose_cuda_graphs(vllm_config: "VllmConfig") -> None:
    """Turn on breakable CUDA graphs, unless the user has decided about graphs or compilation.

    Runs in the process that makes the config, before vLLM reads the switch. Workers inherit it.
    """
    global _switched_on
    if not current_platform.is_cuda():
        return
    mode = vllm_config.compilation_config.mode
    ours = _switched_on and os.environ.get(_SWITCH) == "1"
    if ours and mode not in (None, CompilationMode.NONE):
        del os.environ[_SWITCH]  # it would override the mode that the user asks for
    decided = mode is not None or (_SWITCH in os.environ and not ours)
    eager = vllm_config.model_config.enforce_eager or vllm_config.optimization_level == 0
    if not decided and not eager:
        os.environ[_SWITCH] = "1"
        _switched_on = True
        logger.info(
            "Using breakable CUDA graphs without torch.compile; set %s=0 to compile instead",
            _SWITCH,
        )
        _capture_prompts(vllm_config)
    envs.disable_envs_cache()  # an earlier engine in this process may have cached the old value
    break_graphs_at_attention()


def break_graphs_at_attention() -> None:
    """Make vLLM's attention ops break graphs if they were imported before the switch was set.

    vLLM reads the switch when it imports them. Without this, workers forked from this process would
    capture the attention of a dummy batch and replay it in every mixed step. Our models do not use
    MLA, but an engine that this process starts later may.
    """
    for module, name in _OPS.items():
        if module in sys.modules:
            break_graphs_at(module, name)


def _capture_prompts(vllm_config: "VllmConfig") -> None:
    """Capture steps of up to 2048 tokens; vLLM's default ends at 512.

    Larger steps launch every kernel from Python, whether the model is compiled or not. Below about
    2000 tokens the GPU is faster than those launches. With speculative decoding vLLM chooses the
    sizes.
    """
    graphs = vllm_config.compilation_config
    choices: tuple[object, ...] = (
        graphs.cudagraph_mode,
        graphs.cudagraph_capture_sizes,
        graphs.max_cudagraph_capture_size,
        vllm_config.speculative_config,
    )
    if all(choice is None for choice in choices):
        limit = vllm_config.scheduler_config.max_num_batched_tokens
        graphs.cudagraph_capture_sizes = [size for size in _CAPTURED_TOKENS if size <= limit]
