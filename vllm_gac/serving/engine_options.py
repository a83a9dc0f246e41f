"""Engine options that gac models cannot be served with: refused in the front-end process.

vLLM asks the attention backends that it chooses; ours is named by its layers, so nobody would ask.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm import envs
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# What our attention on a GPU takes as --kv-cache-dtype.
KV_CACHE_DTYPES: tuple[CacheDType, ...] = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


def check_engine_options(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError, naming the option, if one is asked for that our attention lacks."""
    for problem in _problems(vllm_config):
        raise CheckpointError(problem)


def check_role(model_config: "ModelConfig") -> None:
    """Raise CheckpointError if a gac model is to draft for another."""
    if model_config.runner_type == "draft":
        raise CheckpointError(
            f"--speculative-config: {model_config.model} is a gac model, which cannot draft for "
            "another yet; draft with a dense model, or by n-grams"
        )


def _problems(vllm_config: "VllmConfig") -> Iterator[str]:
    parallel = vllm_config.parallel_config
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, flag)
        if size > 1:
            yield (
                f"--{flag.replace('_', '-')}: is {size}; a gac model's context is not divided "
                "among GPUs; use --tensor-parallel-size"
            )
    if not current_platform.is_cuda():
        return
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in KV_CACHE_DTYPES:
        yield (
            f"--kv-cache-dtype: is {dtype}; of a gac model's cache a GPU takes "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    if envs.VLLM_BATCH_INVARIANT:
        yield (
            "VLLM_BATCH_INVARIANT is 1; how a gac model's attention is split, and which kernels "
            "multiply, depends on what else is in a batch; unset it"
        )
