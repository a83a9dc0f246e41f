"""Prefill chunks of many head shapes, within an error relative to the fp32 reference.

On a GPU with every installed kernel. Elsewhere with a stand-in for FlashAttention, which checks our
own part: gathering, rebuilding latent keys, and views over packed rows.
"""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.head_scales import row_scales, spread
from tests.support.processes import run_interpreted
from vllm_gac.gpu.attention_choice import widths
from vllm_gac.kernels.torch_reference import LatentKeys, paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import RopeParameters

BLOCK = 16
# (query tokens, context before them): new prompts, later chunks, a short extension.
CHUNKS = [(100, 0), (64, 64), (33, 190), (1, 7), (17, 0)]
NEW_PROMPTS = [(100, 0), (64, 0), (1, 0), (17, 0)]


@dataclass(frozen=True)
class Heads:
    """A layer's heads; `latent` is the number of KV heads rebuilt from a latent, 0 for rotary."""

    geometry: CacheGeometry
    latent: int = 0

    def __str__(self) -> str:
        g = self.geometry
        form = f"latent{self.latent}" if self.latent else "rotary"
        return f"{form}-{g.key_heads}x{g.key_size}-{g.value_heads}x{g.value_size}"


HEADS = [
    Heads(CacheGeometry(8, 64, 4, 64, 4, 64)),
    Heads(CacheGeometry(8, 96, 4, 96, 4, 64)),
    Heads(CacheGeometry(8, 64, 4, 64, 4, 96)),
    Heads(CacheGeometry(8, 80, 4, 80, 4, 112)),
    Heads(CacheGeometry(8, 192, 4, 192, 4, 128)),
    Heads(CacheGeometry(8, 48, 4, 48, 2, 128)),
    Heads(CacheGeometry(8, 44, 4, 44, 4, 36)),
    Heads(CacheGeometry(8, 128, 4, 64, 2, 128), latent=1),
    Heads(CacheGeometry(8, 128, 2, 128, 2, 80), latent=2),
]
KERNELS = ["FA2", "FA3", "FA4"]


@dataclass(frozen=True)
class Case:
    """One prefill step.

    `quantized` says whether the cache is fp8, `by_head` whether each head then has its own scale,
    `heads_first` whether pages are stored head by head. `max_gathered_tokens` and `in_place` are
    described in serving/attention/prefill.py.
    """

    heads: Heads
    kernel: str
    chunks: tuple[tuple[int, int], ...] = tuple(CHUNKS)
    window: int | None = None
    quantized: bool = False
    by_head: bool = False
    heads_first: bool = False
    max_gathered_tokens: int = 0
    in_place: str | None = None


def relative_error(case: Case, device: str, dtype: torch.dtype) -> float:
    """The error of prefill_attention on random numbers, relative to attention in fp32."""
    from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch

    torch.manual_seed(0)
    g, options = case.heads.geometry, {"device": device, "dtype": dtype}
    lengths = [new + before for new, before in case.chunks]
    starts = torch.tensor([0, *(new for new, _ in case.chunks)]).cumsum(0)
    blocks_each = -(-max(lengths) // BLOCK)
    pages = torch.randperm(len(lengths) * blocks_each, dtype=torch.int32, device=device)
    table = pages.view(len(lengths), blocks_each)
    shape = (pages.numel(), BLOCK, g.value_heads, g.key_width + g.value_size)
    cache = torch.randn(shape, **options).transpose(1, 2)  # vLLM's default on a GPU
    if case.heads_first:
        cache = cache.contiguous()
    scales: list[torch.Tensor | None] = [None, None]
    if case.quantized:
        scales = [torch.tensor([scale], device=device) for scale in (0.5, 1.5)]
        if case.by_head:
            scales = [spread(heads, 0.2).to(device) for heads in (g.key_heads, g.value_heads)]
        cache = cache.to(torch.float8_e4m3fn)
    real = cache.to(dtype)
    if case.quantized:
        real = (cache.float() * row_scales(g, *scales)).to(dtype)
    key, value = torch.cat(
        [
            real[table[i, torch.arange(length - new, length) // BLOCK].long(), :, slots]
            for i, ((new, _), length) in enumerate(zip(case.chunks, lengths, strict=True))
            for slots in [torch.arange(length - new, length) % BLOCK]
        ]
    ).split([g.key_width, g.value_size], dim=-1)
    queries = torch.randn(int(starts[-1]), g.query_heads, g.query_size, **options)
    latent = None
    if case.heads.latent:
        inv_freq = inverse_frequencies(RopeParameters(), g.query_size).to(device)[None]
        up = torch.randn(g.key_heads, case.heads.latent * g.query_size, g.key_size, **options)
        latent = LatentKeys(up * g.key_size**-0.5, inv_freq)

    scale = g.query_size**-0.5
    shape = (*queries.shape[:2], g.value_size)
    expected = torch.empty(shape, device=device)
    paged_attention(
        queries, real, table, starts.tolist(), lengths, g, scale, expected, case.window, latent
    )
    output = torch.full(shape, float("nan"), **options)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    on_host = torch.tensor(lengths)
    on_device = on_host.int().to(device)
    batch = prefill_batch(starts, on_host, on_device, table, case.max_gathered_tokens)
    layer = PrefillLayer(g, case.kernel, capability, scale, case.window, latent, case.in_place)
    prefill_attention(layer, queries, key, value, cache, batch, output, *scales)
    return float((output.float() - expected).norm() / expected.norm())


def cases(kernels: list[str]) -> list[Case]:
    """Every kernel on all heads that it takes on Hopper.

    Covers new prompts, later chunks, a sliding window and an fp8 cache.
    """
    every = []
    for kernel in kernels:
        for heads in HEADS:
            sizes = heads.geometry.head_sizes
            if widths(kernel, sizes, (9, 0)) is None:
                continue
            every += [Case(heads, kernel), Case(heads, kernel, tuple(NEW_PROMPTS))]
        every += [Case(HEADS[1], kernel, window=50), Case(HEADS[7], kernel, window=50)]
        every += [Case(HEADS[1], kernel, quantized=True), Case(HEADS[7], kernel, quantized=True)]
        every += [Case(heads, kernel, heads_first=True) for heads in (HEADS[0], HEADS[1], HEADS[7])]
    # Gathered in parts of one or two sequences, new prompts among them.
    every += [Case(HEADS[i], "FA4", max_gathered_tokens=224) for i in (1, 7)]
    every += [Case(HEADS[5], "FA3", max_gathered_tokens=224)]
    every += [Case(HEADS[i], "FA3", quantized=True, by_head=True) for i in (0, 5, 7, 8)]
    every += [Case(HEADS[1], "FA4", window=50, max_gathered_tokens=100, quantized=True)]
    # Heads that a kernel which reads pages pads.
    every += [Case(heads, "FA4", in_place="FA3", max_gathered_tokens=224) for heads in HEADS[1:4]]
    return [case for case in every if case.kernel in kernels]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_k: int,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    num_splits: int,
    fa_version: int,
) -> None:
    """vLLM's function in plain torch: causal attention over contiguous or paged keys."""
    assert fa_version == 4 or q.shape[2] == v.shape[-1] or q.shape[2] <= 64 or q.shape[2] == 192
    assert fa_version != 2 or q.shape[2] == v.shape[-1]
    assert q.shape[2] == k.shape[-1]
    assert q.shape[2] % 8 == v.shape[-1] % 8 == 0
    assert causal
    for i in range(len(cu_seqlens_q) - 1):
        queries = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        if block_table is None:
            context = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i + 1]))
            keys, values = k[context], v[context]
        else:
            pages = block_table[i].long()
            keys, values = (x[pages].flatten(0, 1)[: int(seqused_k[i])] for x in (k, v))
        count, length = queries.stop - queries.start, keys.shape[0]
        assert count <= max_seqlen_q
        assert length <= max_seqlen_k
        age = torch.arange(length - count, length)[:, None] - torch.arange(length)
        visible = age >= 0 if window_size is None else (age >= 0) & (age <= window_size[0])
        group = q.shape[1] // k.shape[-2]
        keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[queries].float(), keys) * softmax_scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def check_interpreted() -> None:
    """Check all cases on the CPU: with a plain torch function in place of FlashAttention."""
    stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attention)
    sys.modules["vllm.v1.attention.backends.fa_utils"] = stand_in  # type: ignore[assignment]
    for case in cases(KERNELS):
        # The interpreter multiplies bf16 matrices wrongly (seen in Triton 3.9), fp16 ones rightly.
        assert relative_error(case, "cpu", torch.float16) < 2e-3, case


@pytest.mark.slow
def test_prefill_matches_the_reference_in_tritons_interpreter() -> None:
    run_interpreted(check_interpreted, [()])


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases([*KERNELS, "xformers"]), ids=str)
def test_prefill_matches_the_reference_on_a_gpu(case: Case) -> None:
    from vllm_gac.serving.attention.prefill_kernels import installed_gpu

    gpu, geometry = installed_gpu(), case.heads.geometry
    sizes = geometry.head_sizes
    if case.kernel not in gpu.installed or widths(case.kernel, sizes, gpu.capability) is None:
        pytest.skip(f"{case.kernel} does not take {sizes} on this GPU")
    assert relative_error(case, "cuda", torch.bfloat16) < 5e-3
