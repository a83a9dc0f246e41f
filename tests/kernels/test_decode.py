"""The decode kernel against the fp32 reference."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.decode_cases import GPU, decode, random_batch, relative_error
from tests.kernels.interpreter import run_interpreted
from vllm_gac.kernels.decode import decode_attention, decode_scratch
from vllm_gac.kernels.reference import CacheGeometry, paged_attention
from vllm_gac.kernels.tiling import pieces_of


@pytest.mark.parametrize("width", range(8, 257, 8))
@pytest.mark.parametrize("start", [0, 16, 64])
def test_pieces_cover_a_head_size_and_waste_less_than_rounding_it_up(
    width: int, start: int
) -> None:
    pieces = [piece for piece in pieces_of(width, start) if piece]
    assert all(piece >= 16 and piece & (piece - 1) == 0 for piece in pieces)
    assert sum(pieces[:-1]) < width <= sum(pieces) <= max(16, 1 << (width - 1).bit_length())


@pytest.mark.parametrize(("grain", "seeds"), [(8, 12), (1, 6)])
def test_kernel_matches_the_reference_in_tritons_interpreter(grain: int, seeds: int) -> None:
    said = run_interpreted("tests.kernels.decode_cases", 0, seeds, grain)
    assert said.count("relative error") == seeds


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_batch_is_within_half_a_percent(seed: int) -> None:
    batch = random_batch(seed, GPU)
    assert relative_error(batch) < 5e-3, batch.geometry


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_so_is_one_whose_head_sizes_are_misaligned(seed: int) -> None:
    batch = random_batch(seed, replace(GPU, grain=1))
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

    step()  # compiles
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
