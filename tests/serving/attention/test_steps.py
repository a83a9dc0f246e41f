"""The builders of all classes of heads share one step's metadata."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.serving.attention.test_gac_backend import step
from vllm_gac.kernels.decode.launch import decode_scratch
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention import gpu_backend
from vllm_gac.serving.attention import step as steps
from vllm_gac.serving.attention.gpu_backend import GacBuilder
from vllm_gac.serving.attention.step import StepLimits


def builder(scratch: str) -> Any:
    made = object.__new__(GacBuilder)
    # Another object in each builder.
    vars(made).update(limits=StepLimits(1, 4096), scratch=scratch)
    return made


def test_builders_of_all_classes_build_a_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    build = steps.prefill_batches
    monkeypatch.setattr(steps, "prefill_batches", lambda *a: calls.append(1) or build(*a))
    common = step([1, 1, 20, 7], [50, 9, 20, 30])
    built = [builder(name).build(0, common) for name in "abc"]
    assert len(calls) == 1
    assert [metadata.scratch for metadata in built] == ["a", "b", "c"]
    assert len({id(metadata.step) for metadata in built}) == 1
    assert builder("a").build(0, step([1], [5])).step is not built[0].step


@pytest.mark.parametrize("change", ["seq_lens", "block_table_tensor", "query_start_loc"])
def test_a_batch_that_was_changed_is_built_again(change: str) -> None:
    common, made = step([1, 20], [50, 20]), builder("a")
    first = made.build(0, common).step
    setattr(common, change, getattr(common, change).clone())
    again = made.build(0, common).step
    assert again is not first
    assert made.build(0, common).step is again


def test_drafts_do_not_share_a_step() -> None:
    common, made = step([1, 1], [50, 20]), builder("a")
    first = made.build_for_drafting(common, 0).step
    assert made.build_for_drafting(common, 1).step is not first


def test_a_mixed_batch_is_split() -> None:
    batch = steps.step_of(step([1, 1, 20, 7], [50, 9, 20, 30]), StepLimits(1, 0))
    assert batch.decode.tokens == 2
    assert batch.decode.lengths.tolist() == [50, 9]
    assert batch.decode.block_table.shape == (2, 4)
    ((rows, prefill),) = batch.prefills
    assert rows == slice(2, 29)
    assert prefill.query_starts.tolist() == [0, 20, 27]
    assert prefill.context_starts.tolist() == [0, 20, 50]
    assert prefill.lengths.tolist() == [20, 30]
    assert prefill.block_table.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (prefill.max_seqlen_q, prefill.max_seqlen_k) == (20, 30)
    assert prefill.context_tokens == 50
    ((_, gathered),) = steps.step_of(
        step([1, 1, 20, 7], [50, 9, 20, 30]), StepLimits(1, 40)
    ).prefills
    assert [rows for rows, _ in gathered.parts] == [slice(0, 20), slice(20, 27)]
    decoding = steps.step_of(step([1, 1], [50, 9]), StepLimits(1, 0))
    assert (decoding.prefills, decoding.decode.tokens) == ((), 2)


def test_many_prompts_are_split_into_batches() -> None:
    """No batch is larger than the kernels compiled ahead take; each prompt is in one of them."""
    queries = [1, 1, *(2 + i % 3 for i in range(600))]
    common = step(queries, [length + 5 for length in queries])
    batch = steps.step_of(common, StepLimits(1, 0))
    assert [len(prefill.lengths) for _, prefill in batch.prefills] == [256, 256, 88]
    end = 2
    for rows, prefill in batch.prefills:
        assert rows.start == end
        end = rows.stop
        assert prefill.query_starts[0] == prefill.context_starts[0] == 0
        assert prefill.query_starts[-1] == end - rows.start
        assert prefill.context_starts[-1] == prefill.context_tokens == int(prefill.lengths.sum())
    assert end == sum(queries)
    tables = torch.cat([prefill.block_table for _, prefill in batch.prefills])
    assert torch.equal(tables, common.block_table_tensor[2:])


def test_lengths_of_prompts_are_the_hosts_and_those_of_drafts_among_them_the_devices() -> None:
    """The host's lengths of requests that verify drafts are bounds: all drafts may be accepted."""
    prompts_last = step([1, 5, 20, 30], [50, 40, 20, 70], on_host=[53, 43, 21, 71])
    ((_, prefill),) = steps.step_of(prompts_last, StepLimits(8, 0)).prefills
    assert prefill.context_starts.tolist() == [0, 21, 92]
    drafts_between = step([1, 20, 5, 30], [50, 20, 40, 70], on_host=[53, 20, 43, 70])
    ((_, prefill),) = steps.step_of(drafts_between, StepLimits(8, 0)).prefills
    assert prefill.context_starts.tolist() == [0, 20, 60, 130]


PIECES = StepLimits(1, 0, piece=5, piece_keys=300)


def test_a_small_step_is_one_launch_of_the_decode_kernel() -> None:
    """A prompt's pieces follow each other; each sees what comes before it, and its own tokens."""
    common = step([1, 1, 12, 5], [50, 9, 20, 5], on_host=[53, 9, 20, 5])
    batch = steps.step_of(common, PIECES)
    assert batch.prefills == ()
    decode = batch.decode
    assert (decode.tokens, decode.max_query) == (19, 5)
    assert decode.query_starts.tolist() == [0, 1, 2, 7, 12, 14, 19]
    assert decode.lengths.tolist() == [50, 9, 13, 18, 20, 5]
    assert decode.block_table[:, 0].tolist() == [0, 4, 8, 8, 8, 12]
    # Another alignment would be another kernel, compiled while a server serves.
    tensors = decode.query_starts, decode.lengths, decode.block_table
    assert not any(tensor.data_ptr() % 16 for tensor in tensors)


def test_a_request_without_query_tokens_keeps_its_place() -> None:
    decode = steps.step_of(step([0, 1, 12], [0, 9, 20]), PIECES).decode
    assert decode.query_starts.tolist() == [0, 0, 1, 6, 11, 13]
    assert decode.lengths.tolist() == [0, 9, 13, 18, 20]
    assert decode.block_table[:, 0].tolist() == [0, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("queries", "contexts", "limits"),
    [
        ([1, 12], [280, 12], PIECES),  # 280 + 5 + 10 + 12 cached tokens
        ([1, 6], [300, 6], replace(PIECES, piece=0)),
        ([1, 12], [20, 12], replace(PIECES, decode_query=2)),
        ([2] * 200, [2] * 200, replace(PIECES, piece_keys=10_000)),
    ],
)
def test_a_larger_step_is_not(queries: list[int], contexts: list[int], limits: StepLimits) -> None:
    assert steps.step_of(step(queries, contexts), limits).prefills


def test_a_step_whose_lengths_the_host_does_not_know_is_not() -> None:
    common = step([1, 12], [20, 12])
    common.seq_lens_cpu_upper_bound = None
    assert steps.step_of(common, PIECES).prefills


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ([(32, 8, False)], (8, 1 << 15)),
        ([(12, 2, False), (12, 1, False)], (5, 1 << 17)),  # 60 rows of the second
        ([(12, 2, True), (12, 1, True)], (2, 1 << 17)),
        ([(64, 1, False)], (0, 0)),
        ([(32, 8, False, 256)], (8, 1 << 15)),
        ([(16, 2, False, 256)], (4, 1 << 17)),  # results of 32 rows take what registers there are
        ([(16, 2, False, 192)], (4, 1 << 17)),  # five tokens would have the registers of eight
    ],
)
def test_pieces_fit_all_layers(
    heads: list[tuple[Any, ...]], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = SimpleNamespace(cached_dtype=lambda layer: torch.float8_e4m3fn)
    latent = LatentKeys(torch.empty(1, 128, 64), torch.empty(1, 64))
    layers = [
        (
            SimpleNamespace(impl=impl),
            SimpleNamespace(
                geometry=CacheGeometry(query, 128, value, 64, value, *(size or [128])),
                latent=latent if is_latent else None,
            ),
        )
        for query, value, is_latent, *size in heads
    ]
    monkeypatch.setattr(gpu_backend, "prefill_layers", lambda config: iter(layers))
    monkeypatch.setattr(gpu_backend, "max_gathered_tokens", lambda *_: 7)
    config: Any = SimpleNamespace(speculative_config=None)
    limits = gpu_backend.step_limits(config, torch.device("cpu"))
    assert limits == StepLimits(1, 7, *expected)
    drafts = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config.speculative_config = drafts
    assert gpu_backend.step_limits(config, torch.device("cpu")) == StepLimits(4, 7)


def test_layers_share_scratch_that_is_large_enough_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(12, 2, 128), (12, 1, 64), (12, 1, 192)]
    impls: list[Any] = [
        SimpleNamespace(geometry=CacheGeometry(q, 128, v, 128, v, size), latent=None, scratch=None)
        for q, v, size in shapes
    ]
    layers = [(SimpleNamespace(impl=impl), None) for impl in impls]
    monkeypatch.setattr(gpu_backend, "prefill_layers", lambda config: iter(layers))
    monkeypatch.setattr(gpu_backend, "step_limits", lambda *_: PIECES)
    config: Any = None
    shared = gpu_backend._shared_scratch(config, torch.device("cpu"))
    assert gpu_backend._shared_scratch(config, torch.device("cpu")) is shared
    for impl in impls:
        needed = decode_scratch(impl.geometry, PIECES.piece, torch.device("cpu"))
        assert shared.values.numel() >= needed.values.numel()
        assert shared.log_sums.numel() >= needed.log_sums.numel()
