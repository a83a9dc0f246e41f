"""The variant of latent decoding in benchmarks/kernels/latent_rebuild.py."""

import pytest
import torch

from benchmarks.kernels.latent_rebuild import DTYPES, RANKS, SHAPES, Shape, geometry_of, variant
from tests.kernels.no_gpu import BF16, FP8, compiling_for, decode_kind, launch_decode
from tests.kernels.test_compiler import check_shared_memory, wrong_for_hopper
from tests.kernels.test_decode import Batch, random_cache, relative_error
from tests.support.processes import run_interpreted
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.torch_reference import LatentKeys

LENGTHS = [1, 65, 200]


def error_of(rank: int, fp8: bool, tile: int) -> float:
    """Relative error of the variant on short sequences of random numbers, interpreted."""
    geometry = geometry_of(rank)
    generator = torch.Generator().manual_seed(0)
    cache, table = random_cache(geometry, LENGTHS, 16, generator)
    # The interpreter multiplies no bf16 matrices.
    dtype = BF16 if fp8 else torch.float16
    query = torch.randn(len(LENGTHS) + 1, 32, 128, generator=generator).to(dtype)
    up = torch.randn(8, 128, rank, generator=generator).to(dtype) / rank**0.5
    inv_freq = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    scale = torch.tensor([1.5]) if fp8 else None
    batch = Batch(
        geometry, query, cache.to(FP8 if fp8 else dtype), table,
        torch.arange(len(LENGTHS) + 1, dtype=torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32), 1, None, LatentKeys(up, inv_freq[None]),
        scale, scale,
    )  # fmt: skip
    with variant(Shape(tile, 3, 2)):
        return relative_error(batch)


def test_it_agrees_with_the_reference_in_tritons_interpreter() -> None:
    cases = [(32, True, 128), (64, False, 64)]
    errors = run_interpreted(error_of, cases)
    assert all(error < 5e-3 for error in errors), errors


@pytest.mark.slow
def test_it_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_for(HOPPER, monkeypatch) as kernels:
        for name, dtype in DTYPES.items():
            for rank in RANKS:
                for shape in SHAPES[name]:
                    with variant(shape):
                        launch_decode(decode_kind(geometry_of(rank), 1, dtype))
    assert {kernel.name for kernel in kernels} == {"rebuilt_split_kv", "merge"}
    check_shared_memory(kernels, HOPPER)
    assert not wrong_for_hopper(kernels)
