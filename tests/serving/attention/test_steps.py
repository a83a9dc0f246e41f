"""The builders of all classes of heads share one step's metadata."""

from typing import Any

import pytest
import torch

from tests.serving.attention.test_gac_backend import step
from vllm_gac.serving.attention import step as steps
from vllm_gac.serving.attention.gpu_backend import GacBuilder


def builder(scratch: str) -> Any:
    made = object.__new__(GacBuilder)
    tokens = int("4096")  # another object in each builder
    vars(made).update(max_decode_query=1, max_gathered_tokens=tokens, scratch=scratch)
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
    batch = steps.step_of(step([1, 1, 20, 7], [50, 9, 20, 30]), 1, 0)
    assert batch.decode_tokens == 2
    assert batch.decode_lengths.tolist() == [50, 9]
    assert batch.decode_block_table.shape == (2, 4)
    ((rows, prefill),) = batch.prefills
    assert rows == slice(2, 29)
    assert prefill.query_starts.tolist() == [0, 20, 27]
    assert prefill.context_starts.tolist() == [0, 20, 50]
    assert prefill.lengths.tolist() == [20, 30]
    assert prefill.block_table.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert (prefill.max_seqlen_q, prefill.max_seqlen_k) == (20, 30)
    assert prefill.context_tokens == 50
    ((_, gathered),) = steps.step_of(step([1, 1, 20, 7], [50, 9, 20, 30]), 1, 40).prefills
    assert [rows for rows, _ in gathered.parts] == [slice(0, 20), slice(20, 27)]
    decoding = steps.step_of(step([1, 1], [50, 9]), 1, 0)
    assert (decoding.prefills, decoding.decode_tokens) == ((), 2)


def test_many_prompts_are_split_into_batches() -> None:
    """No batch is larger than the kernels compiled ahead take; each prompt is in one of them."""
    queries = [1, 1, *(2 + i % 3 for i in range(600))]
    common = step(queries, [length + 5 for length in queries])
    batch = steps.step_of(common, 1, 0)
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
    ((_, prefill),) = steps.step_of(prompts_last, 8, 0).prefills
    assert prefill.context_starts.tolist() == [0, 21, 92]
    drafts_between = step([1, 20, 5, 30], [50, 20, 40, 70], on_host=[53, 20, 43, 70])
    ((_, prefill),) = steps.step_of(drafts_between, 8, 0).prefills
    assert prefill.context_starts.tolist() == [0, 20, 60, 130]
