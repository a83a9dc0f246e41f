"""The kernel with a rarely renewed softmax reference agrees with the fp32 reference."""

from itertools import product

import pytest
import torch

from benchmarks.kernels.rare_reference.__main__ import (
    CASES,
    DTYPES,
    HEAD_DIM,
    KV_HEADS,
    RENEW_EVERY,
    tilings_of,
)
from benchmarks.kernels.rare_reference.launch import decode_with_rare_reference
from tests.benchmarks.rare_reference_cases import INTERPRETED
from tests.kernels.interpreter import run_interpreted
from tests.kernels.no_gpu import compiling_for, on_no_device
from tests.kernels.sass import unwritten_registers
from vllm_gac.kernels.decode.launch import scratch_for
from vllm_gac.kernels.decode.tiling import Tiling
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry


@pytest.mark.slow
def test_kernel_matches_the_reference_in_tritons_interpreter() -> None:
    said = run_interpreted("tests.benchmarks.rare_reference_cases")
    assert said.count("relative error") == len(INTERPRETED)


def _launch(geometry: CacheGeometry, dtype: torch.dtype, tiling: Tiling, renew_every: int) -> None:
    """Launch on CPU tensors, which only compiles (compiling_for)."""
    group, row = KV_HEADS // geometry.key_heads, geometry.key_width + geometry.value_size
    up = on_no_device(geometry.key_heads, group * HEAD_DIM, geometry.key_size)
    decode_with_rare_reference(
        on_no_device(1, geometry.query_heads, HEAD_DIM),
        on_no_device(2, geometry.value_heads, 16, row, dtype=dtype),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        geometry,
        1.0,
        on_no_device(1, geometry.query_heads, geometry.value_size),
        scratch_for(geometry, 1, torch.device("cpu"), tiling.programs_per_multiprocessor),
        LatentKeys(up, torch.empty(1, HEAD_DIM // 2)),
        tiling,
        renew_every,
    )


@pytest.mark.slow
def test_kernels_of_the_benchmark_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        (geometry, dtype, tiling)
        for geometry, dtype in product(CASES.values(), DTYPES)
        for tiling in tilings_of(geometry, dtype)
    ]
    with compiling_for(HOPPER, monkeypatch) as kernels:
        monkeypatch.setattr(
            "benchmarks.kernels.rare_reference.launch.capability_of", lambda device: HOPPER
        )
        for case in asked:
            _launch(*case, max(RENEW_EVERY))
    memory = shared_memory(HOPPER)
    rare = [kernel for kernel in kernels if kernel.name == "rare_split_kv"]
    assert len(rare) == len(asked)
    for (_, _, tiling), kernel in zip(asked, rare, strict=True):
        programs = tiling.programs_per_multiprocessor
        assert programs * (kernel.shared + 1024) <= memory.multiprocessor, kernel
        assert not unwritten_registers(kernel.sass), kernel
