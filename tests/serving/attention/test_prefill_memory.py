"""Prefill allocates no more memory than vLLM measured, however long the contexts of a step are."""

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention import prefill
from vllm_gac.serving.attention.prefill import (
    PrefillBatch,
    PrefillLayer,
    prefill_attention,
    prefill_batch,
)
from vllm_gac.serving.attention.prefill_kernels import (
    ContextLayout,
    attend,
    installed_gpu,
    kernel_bytes,
)
from vllm_gac.serving.attention.prefill_memory import prefill_bytes, row_bytes, tokens_at_once

H200 = 150_000_000_000  # bytes, about
BLOCK, MIB = 16, 1 << 20
ROTARY = CacheGeometry(32, 96, 8, 96, 8, 64)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)
CONTEXTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 400)), min_size=1, max_size=30
)  # (new tokens, cached before) of each sequence


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of live tensors: those now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and func.overloadpacket.__name__.startswith(
            ("empty", "zeros", "new_empty")
        ):
            size = made.untyped_storage().nbytes()
            self._add(size)
            weakref.finalize(made.untyped_storage(), self._add, -size)
        return made

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class Launcher:
    """A Triton kernel that does nothing. Unlike a mock, it keeps no tensor alive."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


def layer_of(geometry: CacheGeometry, kernel: str, in_place: str | None = None) -> PrefillLayer:
    latent = None
    if geometry is LATENT:
        up = torch.empty(8, 128, 64, dtype=torch.bfloat16, device="meta")
        latent = LatentKeys(up, torch.empty(1, 64, device="meta"))
    return PrefillLayer(geometry, kernel, (9, 0), 0.1, latent=latent, in_place=in_place)


def run(
    layer: PrefillLayer, chunks: list[tuple[int, int]], max_tokens: int, quantized: bool = False
) -> tuple[list[tuple[str, Any]], int]:
    """Every kernel call, as (name, context), and the peak of allocated bytes. Computes nothing."""
    g, options = layer.geometry, {"dtype": torch.bfloat16, "device": "meta"}
    queries, past = map(torch.tensor, zip(*chunks, strict=True))
    starts, lengths = torch.tensor([0, *queries.tolist()]).cumsum(0), queries + past
    on_device = torch.empty(len(chunks), 1, dtype=torch.int32, device="meta")
    batch = prefill_batch(starts, lengths, on_device[:, 0], on_device, max_tokens)
    tokens = int(starts[-1])
    query, output = (
        torch.empty(tokens, g.query_heads, size, **options) for size in (g.query_size, g.value_size)
    )
    key = torch.empty(tokens, g.value_heads, g.key_width, **options)
    value = torch.empty(tokens, g.value_heads, g.value_size, **options)
    cache = torch.empty(4, g.value_heads, BLOCK, g.key_width + g.value_size, **options)
    scale = torch.ones(()) if quantized else None
    calls: list[tuple[str, Any]] = []

    def attend(kernel: str, query: Any, keys: Any, values: Any, starts: Any, *rest: Any) -> None:
        calls.append((kernel, rest[1]))
        attended.append(query.shape[0])

    attended: list[int] = []
    with (
        mock.patch("vllm_gac.kernels.gather_context._gather", Launcher()),
        mock.patch.multiple(prefill, attend=attend, copy_columns=lambda *_, **__: None),
        PeakMemory() as held,
    ):
        prefill_attention(layer, query, key, value, cache, batch, output, scale, scale)
    assert sum(attended) == tokens
    return calls, held.peak


@given(CONTEXTS, st.integers(1, 900))
def test_batch_parts_cover_the_batch(chunks: list[tuple[int, int]], max_tokens: int) -> None:
    """Each token, context and page is in one part, in order; each part is a valid batch."""
    queries, past = map(torch.tensor, zip(*chunks, strict=True))
    starts, lengths = torch.tensor([0, *queries.tolist()]).cumsum(0), queries + past
    table = torch.arange(2 * len(chunks)).view(-1, 2)
    batch = prefill_batch(starts, lengths, lengths, table, max_tokens)
    if not batch.parts:
        assert batch.context_tokens <= max_tokens or len(chunks) == 1
        return
    end = 0
    for rows, part in batch.parts:
        assert rows.start == end
        end = rows.stop
        assert part.query_starts[0] == part.context_starts[0] == 0
        assert part.query_starts[-1] == end - rows.start
        assert part.context_starts[-1] == part.context_tokens == part.lengths.sum()
        assert part.context_tokens <= max_tokens or len(part.lengths) == 1
        assert not part.parts
    assert end == int(starts[-1])
    for name in ("lengths", "block_table"):
        joined = torch.cat([getattr(part, name) for _, part in batch.parts])
        assert torch.equal(joined, getattr(batch, name))


@settings(max_examples=40)
@given(
    CONTEXTS,
    st.sampled_from(
        [
            (ROTARY, "FA4", False),
            (ROTARY, "FA3", False),
            (ROTARY, "FA3", True),
            (ROTARY, "xformers", False),
            (LATENT, "FA3", False),
            (LATENT, "FA4", False),
            (CacheGeometry(32, 100, 8, 100, 4, 68), "FA2", False),
        ]
    ),
)
def test_no_step_allocates_more_than_is_reserved(
    chunks: list[tuple[int, int]], kind: tuple[CacheGeometry, str, bool]
) -> None:
    geometry, kernel, quantized = kind
    layer, max_tokens = layer_of(geometry, kernel), 512
    tokens = sum(new for new, _ in chunks)
    reserved = prefill_bytes(layer, tokens, max_tokens, quantized, torch.bfloat16)
    _, held = run(layer, chunks, max_tokens, quantized)
    assert held <= reserved


def test_xformers_holds_one_result_at_a_time() -> None:
    tokens, heads, kv_heads, size = 100, 32, 8, 64
    query, output = torch.empty(2, tokens, heads, size, dtype=torch.bfloat16, device="meta")
    keys, values = torch.empty(2, tokens, kv_heads, size, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(2, dtype=torch.int32, device="meta")

    def forward(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        return (query.new_empty(query.shape),)

    with (
        mock.patch.object(torch.ops.aten, "_efficient_attention_forward", forward),
        PeakMemory() as held,
    ):
        context = ContextLayout(tokens, starts=starts)
        attend("xformers", query, keys, values, starts, tokens, context, 0.1, None, output)
    assert 0 < held.peak <= kernel_bytes("xformers", tokens, heads, kv_heads, size, torch.bfloat16)


def test_kernels_that_read_pages_gather_nothing() -> None:
    layer = layer_of(CacheGeometry(32, 96, 8, 96, 8, 96), "FA3")
    assert row_bytes(layer, quantized=False, dtype=torch.bfloat16) == 0
    assert row_bytes(layer, quantized=True, dtype=torch.bfloat16) == 8 * 192 * 2
    assert tokens_at_once(0, H200, 131072, 256) == 0
    calls, held = run(layer, [(100, 120_000)] * 80, 1 << 17)
    assert [context.block_table is not None for _, context in calls] == [True]
    assert held == 0


@pytest.mark.parametrize(
    ("chunks", "quantized", "kernel", "pages"),
    [
        ([(100, 120_000)] * 80, False, "FA3", True),
        ([(100, 0), (9, 120_000)], False, "FA3", True),
        ([(2000, 120_000)], False, "FA4", False),
        ([(100, 120_000)], True, "FA4", False),
        ([(100, 0)] * 4, False, "FA4", False),
    ],
)
def test_short_extensions_read_pages_in_place(
    chunks: list[tuple[int, int]], quantized: bool, kernel: str, pages: bool
) -> None:
    calls, _ = run(layer_of(ROTARY, "FA4", in_place="FA3"), chunks, 1 << 17, quantized)
    assert {(name, context.block_table is not None) for name, context in calls} == {(kernel, pages)}


@pytest.fixture
def impl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The implementation of a layer with latent keys, in a server with 4096 tokens of context."""
    from vllm_gac.serving.attention import gpu_backend, prefill_memory

    made = object.__new__(gpu_backend.GacImpl)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )
    vars(made).update(
        prefill_layer=layer_of(LATENT, "FA3"),
        kv_cache_dtype="auto",
        vllm_config=config,
        scratch="for decoding",
    )
    layers = {"0": SimpleNamespace(impl=made)}
    monkeypatch.setattr(prefill_memory, "get_layers_from_vllm_config", lambda *_: layers)
    return made


@pytest.mark.parametrize("measured", [True, False])
def test_profile_run_allocates_prefill_memory(impl: Any, measured: bool) -> None:
    """The measured run has no cache. Later dummy runs have one, and allocate nothing."""
    query, output = torch.empty(2, 1000, 32, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(0 if measured else 9)
    with PeakMemory() as held:
        impl.forward(None, query, query, query, cache, None, output)
    expected = prefill_bytes(impl.prefill_layer, 1000, 4096, quantized=False, dtype=torch.bfloat16)
    assert expected > 4096 * 4096
    assert held.peak == (expected if measured else 0)
    assert held.now == 0


def on_a_gpu(
    layer: PrefillLayer, count: int, new: int, length: int, max_tokens: int = 0
) -> tuple[list[torch.Tensor], PrefillBatch, torch.Tensor]:
    """Query, key, value, cache; `count` sequences that share the pages of `length`; and an output.

    Skips the test where the layer's kernel is not there, and on other GPUs than Hopper.
    """
    gpu = installed_gpu()
    if layer.kernel not in gpu.installed or gpu.capability[0] != 9:
        pytest.skip(f"{layer.kernel} on Hopper")
    torch.manual_seed(0)
    g, pages, tokens = layer.geometry, -(-length // BLOCK), count * new
    shapes = (
        (tokens, g.query_heads, g.query_size),
        (tokens, g.value_heads, g.key_width),
        (tokens, g.value_heads, g.value_size),
        (pages, g.value_heads, BLOCK, g.key_width + g.value_size),
    )
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    table = torch.arange(pages, dtype=torch.int32, device="cuda").expand(count, -1).contiguous()
    starts, lengths = torch.arange(count + 1) * new, torch.full((count,), length)
    batch = prefill_batch(starts, lengths, lengths.int().cuda(), table, max_tokens)
    return tensors, batch, tensors[0].new_empty(tokens, g.query_heads, g.value_size)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("geometry", "kernel", "new"),
    [(ROTARY, "FA4", 900), (ROTARY, "FA4", 60), (LATENT, "FA3", 60), (LATENT, "FA4", 60)],
)
def test_memory_stays_in_bounds_on_a_gpu(geometry: CacheGeometry, kernel: str, new: int) -> None:
    """20 sequences share the pages of 50,000 tokens."""
    latent = None
    if geometry is LATENT:
        inv_freq = 5e5 ** -(torch.arange(64, device="cuda") / 64)
        up = torch.randn(8, 128, 64, dtype=torch.bfloat16, device="cuda") / 8
        latent = LatentKeys(up, inv_freq[None])
    layer = PrefillLayer(geometry, kernel, (9, 0), 0.1, latent=latent)
    count, max_tokens = 20, 1 << 17
    (query, key, value, cache), batch, output = on_a_gpu(
        layer, count, new, 50_000 + new, max_tokens
    )
    assert len(batch.parts) == 10
    prefill_attention(layer, query, key, value, cache, batch, output)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill_attention(layer, query, key, value, cache, batch, output)
    held = torch.cuda.max_memory_allocated() - before
    assert held <= prefill_bytes(layer, count * new, max_tokens, False, torch.bfloat16)
    assert torch.cuda.memory_reserved() < 2 * held + before + (64 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
def test_split_contexts_of_many_short_sequences_on_a_gpu(heads: tuple[int, int]) -> None:
    """FlashAttention 3 reads pages in a step of 200 sequences with 32 new tokens each."""
    layer = layer_of(CacheGeometry(heads[0], 96, heads[1], 96, heads[1], 96), "FA3")
    tensors, batch, output = on_a_gpu(layer, 200, 32, 5_000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill_attention(layer, *tensors, batch, output)
    held = torch.cuda.max_memory_allocated() - before
    reserved = prefill_bytes(layer, 200 * 32, 0, quantized=False, dtype=torch.bfloat16)
    assert held <= reserved + MIB  # 1 MiB for the kernel's scheduler
