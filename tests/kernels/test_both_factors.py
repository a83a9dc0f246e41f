"""Both factors of low-rank linears in one launch agree with torch, and compile for Hopper."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.both_factors_cases import CASES, FP8, check, check_replays, poisoned
from tests.kernels.interpreter import run_interpreted
from tests.kernels.no_gpu import compiling_for, on_no_device
from tests.kernels.test_compiler import wrong_for_hopper
from vllm_gac.kernels import both_factors
from vllm_gac.kernels.both_factors import MAX_TOKENS, Factors, Shape, low_rank, shape_for
from vllm_gac.kernels.gpu_limits import HOPPER, MULTIPROCESSORS, shared_memory

BF16 = torch.bfloat16
COUNTER = torch.zeros(1, dtype=torch.int32)


@pytest.mark.slow
def test_it_matches_torch_in_tritons_interpreter() -> None:
    assert run_interpreted("tests.kernels.both_factors_cases").count("checked") == CASES


def factors(out: int, width: int, rank: int, dtype: torch.dtype = BF16) -> Factors:
    scale = torch.ones(1) if dtype == FP8 else None
    down, up = on_no_device(rank, width, dtype=dtype), on_no_device(out, rank, dtype=dtype)
    return Factors(down, up, scale, scale)


@pytest.mark.slow
def test_it_compiles_for_hopper_and_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_for(HOPPER, monkeypatch) as kernels:
        for dtype in (BF16, FP8):
            for tokens in (16, 64, 128):
                x = on_no_device(tokens, 256, dtype=dtype)
                scales = torch.ones(tokens, 1) if dtype == FP8 else None
                shape = shape_for(tokens, dtype.itemsize, MULTIPROCESSORS)
                for is_gated in (False, True):
                    pair = [factors(256, 256, 64, dtype)] * 2
                    low_rank(x, pair, shape, COUNTER, x_scales=scales, is_gated=is_gated)
    assert len(kernels) == 12
    limit = shared_memory(HOPPER).program
    for kernel in kernels:
        assert kernel.shared <= limit, kernel
        # Hopper's matrix instructions, in both phases, from tiles that copies bring meanwhile.
        product = "QGMMA" if kernel.asked["GRAIN"] == 16 else "HGMMA"
        assert kernel.sass.count(product) >= 8, kernel
        assert "LDGSTS.E.BYPASS.128" in kernel.sass, kernel
        # Who waits at a barrier drops what is in the L1 cache.
        assert "CCTL.IVALL" in kernel.sass, kernel
    assert not wrong_for_hopper(kernels)


@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS + 1, 15))
@pytest.mark.parametrize("itemsize", [1, 2])
def test_a_shape_fits_a_multiprocessor_and_gives_every_part_something(
    tokens: int, itemsize: int
) -> None:
    shape = shape_for(tokens, itemsize, MULTIPROCESSORS)
    assert shape.shared_bytes(itemsize) <= shared_memory(HOPPER).program
    assert itemsize == 2 or shape.step == shape.features  # a group of latents is a step
    blocks = -(-tokens // shape.rows)
    for outputs in ([1600], [1600, 640, 640], [14336] * 2, [8]):
        for width in (128, 640, 4096, 14336):
            splits = shape.splits(outputs, width, blocks)
            steps = -(-width // shape.step)
            assert splits == 1 or (splits - 1) * -(-steps // splits) < steps
            tiles = sum(-(-count // shape.features) for count in outputs)
            assert splits == 1 or splits * tiles * blocks <= shape.programs


SMALL = Shape(2, rows=16, features=64, step=64)


@pytest.mark.parametrize(
    ("x", "linears", "options", "words"),
    [
        ((4, 64), [(8, 64, 8)] * 4, {}, "4 linears"),
        ((4, 64), [(8, 64, 8)], {"is_gated": True}, "1 linears"),
        ((4, 64), [(8, 64, 8), (16, 64, 8)], {"is_gated": True}, r"factors \(8, 64\)"),
        ((4, 60), [(8, 60, 8)], {}, "with strides"),
        ((4, 64), [(8, 64, 12)], {}, r"factors \(12, 64\)"),
        ((4, 64), [(8, 72, 8)], {}, r"for x \(4, 64\)"),
        ((4, 64), [(8, 64, 8)], {"x_scales": torch.ones(4, 1)}, "scales for 8"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    x: tuple[int, int], linears: list[tuple[int, int, int]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        low_rank(
            on_no_device(*x),
            [factors(*shape) for shape in linears],
            SMALL,
            COUNTER,
            **options,  # type: ignore[arg-type]
        )


def test_groups_of_latents_are_steps_in_fp8() -> None:
    x, wrong = on_no_device(4, 64, dtype=FP8), replace(SMALL, step=128)
    with pytest.raises(ValueError, match="steps of 128 for groups of 64"):
        low_rank(x, [factors(8, 64, 16, FP8)], wrong, COUNTER, x_scales=torch.ones(4, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both_factors, "_scratch", poisoned)
    check(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_thousand_replays_are_the_same_bits(
    dtype: torch.dtype, is_gated: bool, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_replays(dtype, is_gated, is_early, monkeypatch.setattr)
