"""Engine options that gac models cannot be served with: refused in the front-end process.

vLLM asks the attention backends that it chooses; ours is named by its layers, so nobody would ask.
"""

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError
from vllm_gac.kernels.gpu_limits import converts_e4m3
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.serving.loading.decode_fit import gpu_capability

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# What our attention on a GPU takes as --dtype, and as --kv-cache-dtype.
DTYPES = (torch.float16, torch.bfloat16)
KV_CACHE_DTYPES: tuple[CacheDType, ...] = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
# Query tokens of a request that its decode kernel takes: one, or those of a speculation.
MAX_DECODE_QUERY = 8


def check_role(model_config: "ModelConfig") -> None:
    """Raise CheckpointError if a gac model is to do what it has no part for.

    That is drafting for another, being of another class, or classifying with a head that vLLM would
    invent.
    """
    if model_config.runner_type == "draft":
        raise CheckpointError(
            f"--speculative-config: {model_config.model} is a gac model, which cannot draft for "
            "another yet; draft with a dense model, or by n-grams"
        )
    if ARCHITECTURE in model_config.model_class_overrides:
        raise CheckpointError(
            f"--model-class-overrides: names {model_config.model_class_overrides[ARCHITECTURE]} "
            f"for {ARCHITECTURE}, whose layers no other class builds; leave it out"
        )
    # vLLM can take the logits of given tokens for a head; a score.weight no gac model has.
    by_tokens = getattr(model_config.hf_config, "classifier_from_token", None)
    if model_config.convert_type == "classify" and by_tokens is None:
        raise CheckpointError(
            f"--convert classify: {model_config.model} is a gac model, which has no score.weight "
            "to classify or score with; use --convert embed, or name the tokens of two answers by "
            '--hf-overrides \'{"method": "from_2_way_softmax", "classifier_from_token": [...]}\''
        )


def check_engine_options(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError, naming the option, if one is asked for that our attention lacks."""
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, flag)
        if size > 1:
            raise CheckpointError(
                f"--{flag.replace('_', '-')}: is {size}; a gac model's context is not divided "
                "among GPUs; use --tensor-parallel-size"
            )
    if not current_platform.is_cuda():
        return
    # vLLM captures the verifying steps of any length in full graphs, in which only the decode
    # kernel is right.
    speculative, most = vllm_config.speculative_config, MAX_DECODE_QUERY - 1
    if speculative is not None and speculative.num_speculative_tokens > most:
        raise CheckpointError(
            f"--speculative-config: num_speculative_tokens is {speculative.num_speculative_tokens};"
            f" of a gac model one step verifies at most {most} drafted tokens; use {most} or fewer"
        )
    own = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if vllm_config.model_config.dtype not in DTYPES:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(
            f"--dtype: is {own}; on a GPU the attention of a gac model takes {names}; use one of "
            "them"
        )
    dtype = vllm_config.cache_config.cache_dtype
    if dtype not in KV_CACHE_DTYPES:
        raise CheckpointError(
            f"--kv-cache-dtype: is {dtype}; of a gac model's cache a GPU takes "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    capability = gpu_capability()
    if dtype.startswith("fp8") and not converts_e4m3(capability):
        raise CheckpointError(
            f"--kv-cache-dtype: is {dtype}; this GPU's compute capability is "
            f"{capability[0]}.{capability[1]}, and Triton has fp8 of that form from 8.9 on; "
            f"use {own}"  # auto may be what a quantizer has made fp8
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise CheckpointError(
            "VLLM_BATCH_INVARIANT is 1; how a gac model's attention is split, and which kernels "
            "multiply, depends on what else is in a batch; unset it"
        )
