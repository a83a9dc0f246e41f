"""The decode kernel agrees with the fp32 reference: on a GPU, and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.decode_cases import (
    GPU,
    check_codes,
    check_interpreted,
    compile_all,
    decode,
    random_batch,
    relative_error,
    tolerance,
)
from tests.support.processes import run_interpreted
from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.torch_reference import paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry

# Head sizes of our plans, arbitrary sizes, and small sizes that fill no tile.
SIZES = {"aligned": GPU, "any": replace(GPU, grain=1), "small": replace(GPU, grain=1, head_size=20)}
SEEDS_AT_ONCE = 40


@pytest.mark.parametrize(
    ("seeds", "grain", "head_size"),
    [
        (range(3), 1, 64),
        pytest.param(range(11), 8, 64, marks=pytest.mark.slow),
        pytest.param(range(5, 9), 1, 20, marks=pytest.mark.slow),
    ],
)
def test_random_batches_are_decoded_in_tritons_interpreter(
    seeds: range, grain: int, head_size: int
) -> None:
    """Head sizes are multiples of `grain`, and at most `head_size`."""
    run_interpreted(check_interpreted, [(seed, grain, head_size) for seed in seeds])


def test_fp8_codes_are_decoded_in_tritons_interpreter() -> None:
    run_interpreted(check_codes, [("cpu",)])


@pytest.mark.gpu
def test_fp8_codes_are_decoded_on_a_gpu() -> None:
    check_codes("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 400, SEEDS_AT_ONCE))
@pytest.mark.parametrize("keys", ["rotary", "latent"])
def test_random_batches_are_within_half_a_percent(keys: str, first: int) -> None:
    sizes = list(SIZES.values())
    batches = {
        seed: random_batch(seed, replace(sizes[seed % 3], latents=float(keys == "latent")))
        for seed in range(first, first + SEEDS_AT_ONCE)
    }
    compile_all(batches.values())
    errors = {seed: relative_error(batch) for seed, batch in batches.items()}
    wrong = {seed: e for seed, e in errors.items() if not e < tolerance(batches[seed])}
    assert not wrong, [(error, batches[seed].geometry) for seed, error in wrong.items()]


@pytest.mark.gpu
def test_latents_of_odd_sizes_that_64_rows_meet_are_decoded() -> None:
    batch = random_batch(39, SIZES["any"])
    assert batch.latent is not None
    assert batch.max_query_len * batch.geometry.query_heads == 64
    assert relative_error(batch) < 5e-3, batch.geometry


@pytest.mark.gpu
def test_captured_graph_follows_lengths_and_pages_that_change() -> None:
    geometry = CacheGeometry(32, 96, 8, 96, 8, 64)
    sequences, blocks, block_size = 8, 64, 16
    device = torch.device("cuda")
    torch.manual_seed(0)
    cache = torch.randn(sequences * blocks, 8, block_size, 160, device=device).bfloat16()
    query = torch.randn(sequences, 32, 96, device=device).bfloat16()
    output = torch.empty(sequences, 32, 64, device=device, dtype=torch.bfloat16)
    table = torch.zeros(sequences, blocks, dtype=torch.int32, device=device)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.ones(sequences, dtype=torch.int32, device=device)
    scratch = decode_scratch(geometry, 1, device)

    def step() -> None:
        decode_attention(query, cache, table, starts, lengths, geometry, 96**-0.5, output, scratch)

    step()  # the first call compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lengths in ([1, 2, 1024, 17, 500, 0, 1, 16], [1024] * 8, [33, 0, 0, 0, 0, 0, 0, 0]):
        real = sum(length > 0 for length in new_lengths)
        lengths.copy_(torch.tensor(new_lengths, dtype=torch.int32))
        table.copy_(torch.randperm(sequences * blocks).int().view(sequences, blocks))
        output.fill_(float("nan"))
        graph.replay()
        expected = torch.zeros(output.shape, device=device)
        paged_attention(
            query, cache, table, starts.tolist(), new_lengths, geometry, 96**-0.5, expected
        )
        assert real > 0
        used = lengths > 0
        assert not output.isnan().any()
        assert (output[~used] == 0).all()
        error = (output[used].float() - expected[used]).norm() / expected[used].norm()
        assert error < 5e-3


@pytest.mark.gpu
def test_same_batch_twice_gives_the_same_bits() -> None:
    batch = random_batch(3, GPU)
    tokens = int(batch.query_start_loc[-1])
    assert torch.equal(decode(batch)[:tokens], decode(batch)[:tokens])
