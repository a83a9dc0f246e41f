"""Refuses engine options that gac models do not support, in the front-end process.

vLLM checks options with the attention backends that it chooses. Our layers name their backend
themselves, so vLLM would not check ours. So is what was not tried with a mixture of experts.
"""

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.config.cache import CacheDType
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_gac.checkpoint.own_tensors import FUSED
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.gpu import decode_fit
from vllm_gac.kernels.gpu_limits import HOPPER, converts_e4m3
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES, NAMES
from vllm_gac.serving.loading.quantized_checkpoint import quantization_section
from vllm_gac.serving.registration import BACKENDS, refuse_if_unregistered

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# The values of --dtype and --kv-cache-dtype that our attention on a GPU supports.
DTYPES = (torch.float16, torch.bfloat16)
KV_CACHE_DTYPES: tuple[CacheDType, ...] = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
# Most query tokens of a decoding request: one, and with speculative decoding the drafted ones.
MAX_DECODE_QUERY = 8
# The value of --attention-backend by which vLLM's own models get our attention.
GAC = "GAC"
# Methods of --speculative-config whose drafter has no attention.
_WITHOUT_ATTENTION = (
    "ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class",
    "extract_hidden_states",
)  # fmt: skip
# What vLLM may fuse a linear into; --lora-target-modules takes either name.
_FUSED = {
    part.rpartition(".")[2]: whole.rpartition(".")[2]
    for whole, parts in FUSED.items()
    for part in parts
}


def check_role(model_config: "ModelConfig") -> None:
    """Raise CheckpointError if a gac model is used for what it cannot do.

    That is to draft for another model, or to classify with a head that its checkpoint lacks.
    """
    if model_config.runner_type == "draft":
        raise CheckpointError(
            f"--speculative-config: {model_config.model} is a gac model, which cannot draft for "
            "another yet; draft with a dense model, or by n-grams"
        )
    # vLLM can classify by the logits of given tokens. No gac model has a score.weight.
    by_tokens = getattr(model_config.hf_config, "classifier_from_token", None)
    if model_config.convert_type == "classify" and by_tokens is None:
        raise CheckpointError(
            f"--convert classify: {model_config.model} is a gac model, which has no score.weight "
            "to classify or score with; use --convert embed, or name the tokens of two answers by "
            '--hf-overrides \'{"method": "from_2_way_softmax", "classifier_from_token": [...]}\''
        )


def check_engine_options(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError, naming the option, if a gac model does not support one."""
    if vllm_config.observability_config.enable_mfu_metrics:
        raise CheckpointError(
            "--enable-mfu-metrics: vLLM counts operations and bytes by config.json, as if all "
            "layers were alike, so the numbers of a gac model would be wrong; leave it out"
        )
    check_backends(vllm_config)
    _check_attention(vllm_config)
    attention = vllm_config.attention_config
    if attention.use_non_causal:
        raise CheckpointError(
            "--attention-config: use_non_causal is true; the attention of a gac model is causal; "
            "leave it out"
        )
    chosen = [attention.backend, *dict(attention.backend_per_kind).values()]
    others = [backend.name for backend in chosen if backend is not None and backend.name != GAC]
    if attention.flash_attn_version is not None:
        others.append(f"FlashAttention {attention.flash_attn_version}")
    if others:
        logger.warning(
            "%s: not for the layers that GAC serves; the lines 'Attention of ...' say which",
            ", ".join(others),
        )


def check_backends(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError if options name one of our backends that the layers cannot use.

    It is raised, too, if a drafter would get ours, which was tried with none.
    """
    attention = vllm_config.attention_config
    named = [attention.backend, *dict(attention.backend_per_kind).values()]
    for_all_layers = gac_backend_requested(vllm_config)
    ours = [
        backend.name for backend in named[for_all_layers:] if backend and backend.name in BACKENDS
    ]
    if ours:
        raise CheckpointError(
            f"--attention-backend {ours[0]}: the layers that need it take it by themselves; leave "
            f"it out, or give --attention-backend {GAC} for all layers of a model on a GPU"
        )
    if for_all_layers and not current_platform.is_cuda():
        raise CheckpointError(
            f"--attention-backend {GAC}: its kernels need an NVIDIA GPU; leave it out"
        )
    _check_drafter(vllm_config)


def _check_drafter(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError if the layers of a drafter would, or might, get one of our backends.

    With its second model runner, vLLM gives the model's backend to a drafter, too, unless it names
    another, and to a whole draft model always.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    named = speculative.attention_backend
    if named is not None and named.name in BACKENDS:
        raise CheckpointError(
            f"--speculative-config: attention_backend is {named.name}, which was not tried with "
            "drafters; name another one"
        )
    if gac_backend_requested(vllm_config) and speculative.method not in _WITHOUT_ATTENTION:
        raise CheckpointError(
            f"--attention-backend {GAC}: was not tried beside a drafter with attention of its own "
            f"({speculative.method}); leave it out, or draft by n-grams"
        )


def gac_backend_requested(vllm_config: "VllmConfig") -> bool:
    """Whether the user names our backend for all layers."""
    backend = vllm_config.attention_config.backend
    return backend is not None and backend.name == GAC


def check_gac_on_dense(vllm_config: "VllmConfig") -> None:
    """Check that our attention can serve the layers of vLLM's own model.

    Raises CheckpointError if it cannot, for what the model, the machine or an option is, and
    VersionError if we could not register with this vLLM.
    """
    refuse_if_unregistered()
    model_config, flag = vllm_config.model_config, f"--attention-backend {GAC}"
    known = [family.architecture for family in FAMILIES.values()]
    if model_config.architecture not in (*known, ARCHITECTURE):
        raise CheckpointError(
            f"{flag}: for {NAMES} only, and {model_config.model} is a "
            f"{model_config.architecture}; leave it out"
        )
    if getattr(model_config.hf_config, "dual_chunk_attention_config", None):
        raise CheckpointError(
            f"{flag}: {model_config.model} has a dual_chunk_attention_config, which it does not "
            "implement; leave it out"
        )
    _check_attention(vllm_config)
    _check_dense_heads(vllm_config)


def _check_attention(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError, naming the option, if our attention does not support one."""
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, flag)
        if size > 1:
            raise CheckpointError(
                f"--{flag.replace('_', '-')}: is {size}; GAC attention does not support context "
                "parallelism; use --tensor-parallel-size"
            )
    if not current_platform.is_cuda():
        return
    # vLLM captures verification steps of any length in full CUDA graphs, where only the decode
    # kernel gives correct results.
    speculative, max_drafted = vllm_config.speculative_config, MAX_DECODE_QUERY - 1
    if speculative is not None and speculative.num_speculative_tokens > max_drafted:
        raise CheckpointError(
            f"--speculative-config: num_speculative_tokens is {speculative.num_speculative_tokens};"
            f" one step with GAC attention verifies at most {max_drafted} drafted tokens; use "
            f"{max_drafted} or fewer"
        )
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if vllm_config.model_config.dtype not in DTYPES:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CheckpointError(
            f"--dtype: is {model_dtype}; on a GPU GAC attention takes {names}; use one of them"
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in KV_CACHE_DTYPES:
        raise CheckpointError(
            f"--kv-cache-dtype: is {cache_dtype}; on a GPU the cache of GAC attention takes "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    if cache_dtype in ("float16", "bfloat16") and cache_dtype != model_dtype:
        raise CheckpointError(
            f"--kv-cache-dtype: is {cache_dtype}, and --dtype is {model_dtype}; on a GPU prefill "
            f"reads cached keys in the dtype of the queries; use {model_dtype} or fp8"
        )
    capability = _gpu_capability()
    if cache_dtype.startswith("fp8") and not converts_e4m3(capability):
        raise CheckpointError(
            f"--kv-cache-dtype: is {cache_dtype}; this GPU's compute capability is "
            f"{capability[0]}.{capability[1]}, and Triton supports this fp8 format from 8.9 "
            f"on; use {model_dtype}"  # not auto, which a quantizer's config may turn into fp8
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise CheckpointError(
            "VLLM_BATCH_INVARIANT is 1; GAC attention splits its work, and a gac model chooses its "
            "GEMM kernels, by the whole batch, so results depend on other requests; unset it"
        )


def check_experts(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError if the model has experts and an option that concerns them is given.

    vLLM's own block honours these in ways of its own.
    """
    if layout.experts is None:
        return
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for option, is_given in (
        ("config.json: quantization_config", quantization_section(model.hf_config) is not None),
        ("--quantization", model.quantization or model.quantization_config),
        ("--enable-lora", vllm_config.lora_config),
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-dbo", parallel.enable_dbo),
        ("--data-parallel-size", parallel.data_parallel_size > 1),
    ):
        if is_given:
            raise CheckpointError(
                f"{option}: not tried with experts beside compressed attention; leave it out, or "
                "serve the dense model"
            )


def check_lora_targets(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError if `--lora-target-modules` names a linear that is low rank.

    Only its factors are linear layers to vLLM, which would fail with the model loaded.
    """
    lora = vllm_config.lora_config
    targets = set((lora and lora.target_modules) or ())
    for index, layer in enumerate(layout.layers):
        for linear in layer.ranks:
            name, leaf = f"model.layers.{index}.{linear}", linear.rpartition(".")[2]
            for target in targets & {name, leaf, _FUSED.get(leaf)}:
                raise CheckpointError(
                    f"--lora-target-modules: names {target}, but {name} is stored as two factors, "
                    "which vLLM adapts one by one; leave the option out to adapt every linear, or "
                    "name A and B, the factors, and linears that are low rank in no layer"
                )


def _gpu_capability() -> tuple[int, int]:
    """Compute capability of this machine's GPUs; Hopper's if vLLM does not know it."""
    capability = current_platform.get_device_capability()
    return HOPPER if capability is None else (capability.major, capability.minor)


def check_decode_kernel(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError, naming the layer, if its decode kernel does not fit this GPU."""
    if not current_platform.is_cuda():
        return
    queries, itemsizes = _served(vllm_config)
    checked = set()  # many layers have the same heads
    for index, layer in enumerate(layout.layers):
        attention = layer.query_heads, layer.key, layer.value
        if attention in checked:
            continue
        try:
            decode_fit.check_layer(layout, layer, _gpu_capability(), queries, itemsizes)
        except GacError as error:
            raise CheckpointError(f"layer {index}: {error}") from None
        checked.add(attention)


def _check_dense_heads(vllm_config: "VllmConfig") -> None:
    """The same for the layers of vLLM's own model, which all have the same heads."""
    model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
    kv_heads, size = model_config.get_num_kv_heads(parallel_config), model_config.get_head_size()
    heads = model_config.get_num_attention_heads(parallel_config)
    geometry = CacheGeometry(heads, size, kv_heads, size, kv_heads, size)
    try:
        decode_fit.check_heads(geometry, 0, _gpu_capability(), *_served(vllm_config))
    except GacError as error:
        fault = str(error).partition(";")[0]  # what follows is about choosing heads
        raise CheckpointError(f"--attention-backend GAC: {fault}; leave it out") from None


def _served(vllm_config: "VllmConfig") -> tuple[int, tuple[int, ...]]:
    """Query tokens of a decoding request, and bytes of cached numbers for each cache dtype."""
    speculative, cache = vllm_config.speculative_config, vllm_config.cache_config
    queries = 1 if speculative is None else 1 + speculative.num_speculative_tokens
    fp8, mixed = cache.cache_dtype.startswith("fp8"), bool(cache.kv_cache_dtype_skip_layers)
    return queries, (1, 2) if fp8 and mixed else (1,) if fp8 else (2,)
