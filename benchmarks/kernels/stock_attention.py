"""The decode kernels of vLLM 0.32, called as its backends call them."""

from collections.abc import Callable

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


def _flash(
    batch: DecodeBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor | None,
    version: int,
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
