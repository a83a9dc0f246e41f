"""vLLM's own kernels, called as its backends and layers call them; to be measured."""

import itertools
from collections.abc import Callable

import torch

from vllm_gac.errors import GacError
from vllm_gac.gpu.profile import W4A16_GROUP
from vllm_gac.serving.vllm_internals import kernel_calls, packed_linear, swiglu_kernel

# What vLLM captures decode graphs with (attention_config.flash_attn_max_num_splits_for_cuda_graph).
_SPLITS = 32


def stock_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    next_table: Callable[[], torch.Tensor],
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float,
    output: torch.Tensor,
) -> Callable[[], None]:
    """A decode step of equal heads; the schedule, made once a step, is made beforehand.

    Shapes as decode_attention takes them, with as many keys as values in a cache row; `next_table`
    gives each call's block table. If the cache is e4m3, queries are, too; what quantizes them is
    not part of the step. Raises GacError if this GPU's kernel takes no such cache.
    """
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
        get_scheduler_metadata,
    )

    rows = kv_cache.transpose(1, 2)
    keys, values = rows.chunk(2, dim=-1)
    scales: dict[str, torch.Tensor] = {}
    version = get_flash_attn_version(head_size=keys.shape[-1])
    if kv_cache.itemsize == 1:
        if version == 2:
            raise GacError("FlashAttention 2 takes no FP8 cache")
        query = query.to(kv_cache.dtype)
        one = torch.ones(1, device=query.device).expand(lengths.shape[0], keys.shape[2])
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)
    schedule = None
    if version == 3:
        schedule = get_scheduler_metadata(
            batch_size=lengths.shape[0],
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=query.shape[1],
            num_heads_kv=keys.shape[2],
            headdim=keys.shape[-1],
            cache_seqlens=lengths,
            qkv_dtype=query.dtype,
            cu_seqlens_q=query_starts,
            page_size=keys.shape[1],
            causal=True,
            num_splits=_SPLITS,
        )

    def call() -> None:
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=query_starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            block_table=next_table(),
            scheduler_metadata=schedule,
            num_splits=_SPLITS if version == 3 else 0,
            fa_version=version,
            **scales,
        )

    return call


def stock_prefill_kernel() -> str:
    """The FlashAttention that vLLM chooses, by its name in gpu/attention_choice.py."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return f"FA{get_flash_attn_version()}"


def fp8_multiply(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies x by an e4m3 weight, as --quantization fp8_per_tensor does.

    It makes [m, n] in bf16 of w [k, n], e4m3 and column by column in memory. x is e4m3 [m, k], and
    each token has a scale of its own.
    """
    multiply = kernel_calls().cutlass_scaled_mm
    by_token = torch.ones(x.shape[0], 1, device=x.device)
    by_tensor = torch.ones(1, device=x.device)
    return lambda w: multiply(x, w, by_token, by_tensor, torch.bfloat16)


def w4a16_multiply(n: int, k: int, copies: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies x [m, k] by the next of `copies` weights [n, k] of four bits.

    vLLM chooses the kernel for these dims on torch's default device; k is a multiple of 128.
    """
    module, scheme = packed_linear(n, k, W4A16_GROUP)
    turn = itertools.cycle([module, *(_copy(module) for _ in range(copies - 1))])
    return lambda x: scheme.apply_weights(next(turn), x, None)


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """The same with parameters of its own, of which vLLM's cannot be copied as modules are."""
    other = torch.nn.Module()
    for name, value in vars(module).items():
        if not name.startswith("_"):
            setattr(other, name, value)
    for name, parameter in module.named_parameters():
        other.register_parameter(name, torch.nn.Parameter(parameter.data.clone(), False))
    return other


def activation_pass(kernel: str, x: torch.Tensor) -> Callable[[], object]:
    """A call of one kernel, named as in `PassTime`, over activations.

    x is [tokens, width], bf16; for `swiglu`, gate and up beside each other [tokens, 2 * width].
    """
    if kernel == "quantize":
        ops = kernel_calls()
        return lambda: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    out, swiglu = x.new_empty(x.shape[0], x.shape[1] // 2), swiglu_kernel()
    return lambda: swiglu(out, x)
