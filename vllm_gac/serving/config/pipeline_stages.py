"""How many layers each pipeline stage has.

vLLM gives all stages as many. But layers of a compressed model cache different amounts: the stage
that is full first limits the room of all, and it reads most in each step.
"""

import math
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_gac.serving.config.served_layout import quantizations
from vllm_gac.serving.gac_config import GacConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_VARIABLE = "VLLM_PP_LAYER_PARTITION"
# What we have set, for this engine or for one that this process started before.
_chosen: str | None = None


def choose_stages(vllm_config: "VllmConfig") -> None:
    """Give stages as many bytes of weights and cache each, unless the user has decided.

    The cache is that of as many tokens as GPUs have room for and the scheduler takes. Runs in the
    process that makes the config; workers inherit it.
    """
    global _chosen
    forget_stages()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    stages = parallel.pipeline_parallel_size
    # Each node decides, and each engine that sends caches: none may differ because its GPU does.
    is_one_of_many = parallel.nnodes > 1 or vllm_config.kv_transfer_config is not None
    if stages == 1 or is_one_of_many or _VARIABLE in os.environ:
        return
    layout = GacConfig.of(model.hf_config).served
    weight = 1 if quantizations(model) - {""} else model.dtype.itemsize
    cached = 1 if cache.cache_dtype.startswith("fp8") else model.dtype.itemsize
    free = cache.kv_cache_memory_bytes
    gpus = stages * parallel.tensor_parallel_size
    if free is None:
        free = cache.gpu_memory_utilization * current_platform.get_device_total_memory()
        free -= weight * layout.parameters / gpus
    tokens = max(0.0, gpus * free / (cached * layout.kv_elements))
    tokens = min(tokens, scheduler.max_num_seqs * model.max_model_len)
    sizes = [
        weight * sum(math.prod(shape) for _, shape in layout.layer_tensors(index))
        + tokens * cached * layer.kv_elements
        for index, layer in enumerate(layout.layers)
    ]
    for end in (0, -1):  # the embedding, and the head
        sizes[end] += layout.vocab_size * layout.hidden_size * model.dtype.itemsize
    _chosen = ",".join(map(str, balanced(sizes, stages)))
    os.environ[_VARIABLE] = _chosen
    envs.disable_envs_cache()  # an earlier engine may have cached the old value
    logger.info("Pipeline stages of %s layers, by bytes; set %s for others", _chosen, _VARIABLE)


def forget_stages() -> None:
    """Remove the variable if we set it, for an engine that this process started before."""
    if _chosen is not None and os.environ.get(_VARIABLE) == _chosen:
        del os.environ[_VARIABLE]
        envs.disable_envs_cache()


def balanced(sizes: Sequence[float], stages: int) -> list[int]:
    """How many layers of these sizes each stage has, at least one: a cut is next to each share."""
    sums, cuts = [0.0, *accumulate(sizes)], [0]
    for stage in range(1, stages):
        share = sums[-1] * stage / stages
        behind = range(cuts[-1] + 1, len(sizes) - stages + stage + 1)
        cuts.append(min((abs(sums[cut] - share), cut) for cut in behind)[1])
    return [end - begin for begin, end in pairwise([*cuts, len(sizes)])]
