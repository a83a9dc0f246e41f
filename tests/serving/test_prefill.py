"""Prefill over the gathered cache against the fp32 reference, in chunks.

On a GPU with vLLM's FlashAttention; elsewhere with a stand-in for that one function, so that what
is ours (gathering, rebuilding, padding) is tested everywhere.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_gac.kernels.reference import CacheGeometry, LatentKeys, paged_attention
from vllm_gac.rope import inverse_frequencies
from vllm_gac.schema import RopeParameters

BLOCK = 16
# (query tokens, context before them): whole prompts, later chunks, a short extension.
SEQUENCES = [(100, 0), (64, 64), (33, 190), (1, 7), (17, 0)]
GEOMETRIES = [
    CacheGeometry(8, 96, 4, 96, 4, 64),
    CacheGeometry(8, 64, 4, 64, 4, 96),
    CacheGeometry(8, 48, 4, 48, 2, 128),
    CacheGeometry(8, 128, 2, 128, 2, 80),
    CacheGeometry(8, 128, 4, 64, 2, 128),  # latent from here on
    CacheGeometry(8, 128, 2, 128, 2, 128),
]


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module under test, on a CPU with FlashAttention's interface in plain torch below it."""
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        stand_in = SimpleNamespace(
            flash_attn_varlen_func=_flash_attention,
            get_flash_attn_version=lambda head_size: 3 if head_size % 8 == 0 else None,
        )
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", stand_in)
        monkeypatch.delitem(sys.modules, "vllm_gac.serving.prefill", raising=False)
    import vllm_gac.serving.prefill as module

    monkeypatch.delitem(sys.modules, "vllm_gac.serving.prefill")
    return module


def _flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    fa_version: int,
) -> torch.Tensor:
    """Causal attention aligned at the last token, with heads all of one size."""
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert k.shape[1] == v.shape[1]
    assert causal
    assert fa_version == 3
    out = torch.empty_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        context = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
        count, length = queries.stop - queries.start, context.stop - context.start
        assert count <= max_seqlen_q
        assert length <= max_seqlen_k
        age = torch.arange(length - count, length)[:, None] - torch.arange(length)
        visible = age >= 0 if window_size is None else (age >= 0) & (age <= window_size[0])
        group = q.shape[1] // k.shape[1]
        keys, values = (x[context].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[queries].float(), keys) * softmax_scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_prefill_is_within_a_percent_of_the_reference(
    prefill: ModuleType, geometry: CacheGeometry, window: int | None
) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"device": device, "dtype": torch.bfloat16}
    lengths = [before + new for new, before in SEQUENCES]
    starts = torch.tensor([0, *torch.tensor([new for new, _ in SEQUENCES]).cumsum(0).tolist()])
    blocks_each = -(-max(lengths) // BLOCK)
    pages = torch.randperm(len(lengths) * blocks_each, dtype=torch.int32, device=device)
    table = pages.view(len(lengths), blocks_each)
    row = geometry.key_width + geometry.value_size
    cache = torch.randn(pages.numel(), geometry.value_heads, BLOCK, row, **options)
    shape = (int(starts[-1]), geometry.query_heads)
    query = torch.randn(*shape, geometry.query_size, **options)
    latent = None
    if geometry in GEOMETRIES[4:]:
        inv_freq = inverse_frequencies(RopeParameters(), geometry.query_size).to(device)[None]
        group = 4 // geometry.key_heads
        up = torch.randn(geometry.key_heads, group * 128, geometry.key_size, **options)
        latent = LatentKeys(up * geometry.key_size**-0.5, inv_freq)

    expected = torch.empty(*shape, geometry.value_size, device=device)
    arguments = (geometry, geometry.query_size**-0.5)
    paged_attention(
        query, cache, table, starts.tolist(), lengths, *arguments, expected, window, latent
    )
    found = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
    batch = prefill.prefill_batch(starts, torch.tensor(lengths, dtype=torch.int32), table)
    prefill.prefill_attention(query, cache, batch, *arguments, found, window, latent)

    error = (found.float() - expected).norm() / expected.norm()
    assert float(error) < 1e-2
