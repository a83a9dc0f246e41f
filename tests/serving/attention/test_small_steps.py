"""The decode kernel attends to prompts in pieces as the fp32 reference does to whole prompts."""

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.test_decode import (
    GPU,
    INTERPRETER,
    Batch,
    Limits,
    decode,
    random_batch,
    relative_error,
    tolerance,
)
from tests.serving.attention.test_gac_backend import step
from tests.support.processes import run_interpreted
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.serving.attention.step import StepLimits, build_step

SEEDS = range(40)


def with_prompts(seed: int, limits: Limits) -> Batch:
    """The random batch of this seed, where more than the last tokens of a sequence may be new."""
    rng = random.Random(seed)
    batch = random_batch(seed, limits)
    queries = [rng.choice([min(1, n), n, rng.randint(0, n)]) for n in batch.seq_lens.tolist()]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(int(starts[-1]) + 1, *batch.query.shape[1:], generator=generator)
    return replace(
        batch, query=query.to(batch.query), query_start_loc=starts.to(batch.query.device)
    )


def in_pieces(batch: Batch) -> Batch:
    """The batch as our backend gives it to the decode kernel."""
    queries, contexts = batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist()
    common = step([*queries, 2], [*contexts, 2])  # whatever they are, one is a prompt
    common.seq_lens = common.seq_lens.to(batch.seq_lens)
    common.block_table_tensor = torch.cat([batch.block_table, batch.block_table[:1]])
    rows = batch.geometry.query_heads // batch.geometry.value_heads
    piece = max(2, min(8, (64 if batch.latent is None else 32) // rows))
    whole = build_step(common, StepLimits(1, 0, piece, 1 << 30)).decode
    return replace(
        batch,
        query_start_loc=whole.query_starts[:-1],
        seq_lens=whole.lengths[:-1],
        block_table=whole.block_table[:-1],
        max_query_len=piece,
    )


def check_interpreted(seed: int) -> None:
    """So it is in Triton's interpreter."""
    batch = with_prompts(seed, replace(INTERPRETER, context=40))
    assert relative_error(batch, in_pieces(batch)) < tolerance(batch), (seed, batch.geometry)


@pytest.mark.slow
def test_prompts_in_pieces_match_torch_in_tritons_interpreter() -> None:
    run_interpreted(check_interpreted, [(seed,) for seed in range(8)])


@pytest.mark.gpu
def test_prompts_in_pieces_match_torch_on_a_gpu() -> None:
    batches = {seed: with_prompts(seed, replace(GPU, context=100)) for seed in SEEDS}
    with compiling_on_all_cores():
        for batch in batches.values():
            decode(in_pieces(batch), only_compile=True)
    errors = {seed: relative_error(batch, in_pieces(batch)) for seed, batch in batches.items()}
    wrong = {seed: e for seed, e in errors.items() if not e < tolerance(batches[seed])}
    assert not wrong, [(error, batches[seed].geometry) for seed, error in wrong.items()]
