"""The decode kernels of vLLM 0.32, called as its backends call them."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_gac.profiling.decode_batch import DecodeBatch


def stock_kernels(batch: DecodeBatch) -> dict[str, Callable[[], None]]:
    """Every stock kernel by name, as a call that decodes `batch`; some refuse its dims.

    With an fp8 cache, FA3 and Triton take queries in fp8, too, as vLLM passes them; FA4 converts
    the cache. Quantizing the queries is not part of the calls.
    """
    paged = batch.cache.transpose(1, 2)  # [block, token, head, row], as these kernels index it
    keys = paged[..., : batch.geometry.key_width]
    values = paged[..., batch.geometry.key_width :]
    query, scale = batch.query, None
    if batch.cache.itemsize == 1:
        query, scale = query.to(batch.cache.dtype), torch.ones((), device="cuda")
    return {
        "FA3": lambda: _flash(batch, query, keys, values, scale, 3),
        "FA4": lambda: _flash(batch, batch.query, keys, values, scale, 4),
        "Triton": _triton(batch, query, keys, values, scale),
    }


def scheduled_fa3(batch: DecodeBatch, splits: int) -> Callable[[], None]:
    """FA3 as an engine calls it: the schedule is made once for all layers, so beforehand.

    Args:
        batch: What it decodes, with equal heads and sizes.
        splits: The most parts of a context. An engine captures graphs with 32; 0 leaves it to FA3.
    """
    from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

    paged = batch.cache.transpose(1, 2)
    keys, values = paged.chunk(2, dim=-1)
    query, scale = batch.query, None
    if batch.cache.itemsize == 1:
        query, scale = query.to(batch.cache.dtype), torch.ones((), device="cuda")
    schedule = get_scheduler_metadata(
        batch_size=query.shape[0],
        max_seqlen_q=1,
        max_seqlen_k=batch.context,
        num_heads_q=query.shape[1],
        num_heads_kv=keys.shape[2],
        headdim=keys.shape[-1],
        cache_seqlens=batch.seq_lens,
        qkv_dtype=query.dtype,
        cu_seqlens_q=batch.query_start_loc,
        page_size=keys.shape[1],
        causal=True,
        num_splits=splits,
    )
    more = {"scheduler_metadata": schedule, "num_splits": splits}
    return lambda: _flash(batch, query, keys, values, scale, 3, **more)


def _flash(
    batch: DecodeBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor | None,
    version: int,
    **more: Any,
) -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    of_each_head = (batch.query.shape[0], batch.geometry.value_heads)
    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=batch.output,
        cu_seqlens_q=batch.query_start_loc,
        max_seqlen_q=1,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.context,
        softmax_scale=batch.scale,
        causal=True,
        window_size=[-1, -1],
        block_table=batch.next_table(),
        fa_version=version,
        **_descales(None if scale is None else scale.expand(of_each_head)),
        **more,
    )


def _descales(scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if scale is None else dict.fromkeys(("q_descale", "k_descale", "v_descale"), scale)


def _triton(
    batch: DecodeBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor | None,
) -> Callable[[], None]:
    from vllm.v1.attention.ops.triton_unified_attention_diffkv import unified_attention_diffkv

    segments, heads = 16, batch.geometry.query_heads
    shape = (batch.query.shape[0], heads, segments)
    width = 1 << (batch.geometry.value_size - 1).bit_length()
    partial = torch.empty((*shape, width), device="cuda")
    highest, total = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")

    def call() -> None:
        unified_attention_diffkv(
            q=query,
            k=keys,
            v=values,
            out=batch.output,
            cu_seqlens_q=batch.query_start_loc,
            seqused_k=batch.seq_lens,
            softmax_scale=batch.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.next_table(),
            softcap=0.0,
            max_seqlen_q=1,
            seq_threshold_3D=128 // batch.geometry.value_heads,
            num_par_softmax_segments=segments,
            softmax_segm_output=partial,
            softmax_segm_max=highest,
            softmax_segm_expsum=total,
            **_descales(scale),
        )

    return call
