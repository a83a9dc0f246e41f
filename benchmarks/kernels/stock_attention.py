"""The decode kernels of vLLM 0.32, called as its backends call them."""

from collections.abc import Callable

import torch

from vllm_gac.profiling.decode_batch import DecodeBatch


def stock_kernels(batch: DecodeBatch) -> dict[str, Callable[[], None]]:
    """Every stock kernel by name, as a call that decodes `batch`; some refuse its dims."""
    paged = batch.cache.transpose(1, 2)  # [block, token, head, row], as these kernels index it
    keys = paged[..., : batch.geometry.key_width]
    values = paged[..., batch.geometry.key_width :]
    return {
        "FA3": lambda: _flash(batch, keys, values, 3),
        "FA4": lambda: _flash(batch, keys, values, 4),
        "Triton": _triton(batch, keys, values),
    }


def _flash(batch: DecodeBatch, keys: torch.Tensor, values: torch.Tensor, version: int) -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=batch.query,
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
    )


def _triton(batch: DecodeBatch, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
    from vllm.v1.attention.ops.triton_unified_attention_diffkv import unified_attention_diffkv

    segments, heads = 16, batch.geometry.query_heads
    shape = (batch.query.shape[0], heads, segments)
    width = 1 << (batch.geometry.value_size - 1).bit_length()
    partial = torch.empty((*shape, width), device="cuda")
    highest, total = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")

    def call() -> None:
        unified_attention_diffkv(
            q=batch.query,
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
        )

    return call
