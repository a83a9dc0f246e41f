"""On a GPU gac models run in breakable CUDA graphs, without torch.compile unless it is asked for.

vLLM cuts a model at its attention ops and compiles each distinct piece, which takes seconds; of a
dense model that is one piece for all layers, of a compressed one a piece for every two neighbours
of other dims. Breakable CUDA graphs, vLLM's default for several architectures of its own, capture
the same kernels with nothing compiled: what Inductor would fuse here are norms, activations and
rotations, and there are kernels for each. Ours rotate and cache in one (kernels/rotary.py) and
multiply by gate and up and activate in one (kernels/swiglu.py), which Inductor cannot.
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
# vLLM's attention ops, which end a capture if they were imported with the switch on.
_OPS = {
    "vllm.model_executor.layers.attention.attention": "unified_attention_with_output",
    "vllm.model_executor.layers.attention.mla_attention": "unified_mla_attention_with_output",
}
# vLLM's own, and on from there in what a GEMM's tile takes at no cost.
_CAPTURED_TOKENS = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(640, 2049, 128)]
# Whether we switched it on, for this engine or one that this process has started before.
_switched_on = False


def choose_cuda_graphs(vllm_config: "VllmConfig") -> None:
    """Switch breakable CUDA graphs on, unless the user decided.

    In the process that makes the config, before vLLM looks at the switch; workers inherit it.
    """
    global _switched_on
    if not current_platform.is_cuda():
        return
    mode = vllm_config.compilation_config.mode
    ours = _switched_on and os.environ.get(_SWITCH) == "1"
    if ours and mode not in (None, CompilationMode.NONE):
        del os.environ[_SWITCH]  # it would win over what this engine is asked for
    decided = mode is not None or (_SWITCH in os.environ and not ours)
    if not decided and not vllm_config.model_config.enforce_eager:
        os.environ[_SWITCH] = "1"
        _switched_on = True
        logger.info("Not compiled, but captured in breakable CUDA graphs; %s=0 compiles", _SWITCH)
        _capture_prompts(vllm_config)
    envs.disable_envs_cache()  # what an engine in this process may have kept of them
    break_graphs_at_attention()


def break_graphs_at_attention() -> None:
    """Have vLLM's attention ops break graphs, if they were imported before that was switched on.

    vLLM looks at the switch when it imports them. Workers that are forked off this process would
    else capture the attention of a dummy batch, and replay that in every mixed step. Ops that our
    models do not have are those of engines that this process starts later.
    """
    for module, name in _OPS.items():
        if module in sys.modules:
            break_graphs_at(module, name)


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
