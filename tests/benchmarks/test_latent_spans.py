"""The kernel with spans agrees with the fp32 reference, and its slow pairs with their rotation."""

import re

import pytest
import torch

from benchmarks.kernels.latent_spans.__main__ import (
    CASES,
    CONFIGURATIONS,
    HEAD_DIM,
    KV_HEADS,
    Spans,
)
from benchmarks.kernels.latent_spans.launch import decode_with_spans, tiling_for
from benchmarks.kernels.latent_spans.slow_pairs import (
    TERMS,
    TOLERANCE,
    coefficients,
    span_keys,
    split_pairs,
)
from tests.kernels.interpreter import run_interpreted
from tests.kernels.no_gpu import compiling_for, on_no_device
from tests.kernels.sass import unwritten_registers
from vllm_gac.kernels.decode.launch import scratch_for
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.layout.cache_geometry import CacheGeometry

CPU = torch.device("cpu")


def _launch(geometry: CacheGeometry, spans: Spans) -> None:
    """Launch on CPU tensors, which only compiles (compiling_for)."""
    group = KV_HEADS // geometry.key_heads
    up = torch.zeros(geometry.key_heads, group * HEAD_DIM, geometry.key_size, dtype=torch.bfloat16)
    frequency = inv_freq(5e5)
    keys = span_keys(up, frequency, split_pairs(frequency, spans.span, spans.terms))
    decode_with_spans(
        on_no_device(1, geometry.query_heads, HEAD_DIM),
        on_no_device(2, geometry.value_heads, 16, geometry.key_width + geometry.value_size),
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        geometry,
        1.0,
        on_no_device(1, geometry.query_heads, geometry.value_size),
        scratch_for(geometry, 1, CPU, spans.programs),
        keys,
        tiling_for(geometry, group, spans.tile, spans.warps, spans.stages, spans.programs),
        without_slow_pairs=spans.is_bound,
    )


def inv_freq(base: float) -> torch.Tensor:
    return base ** -(torch.arange(0, 128, 2) / 128)


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize(("span", "terms"), [(64, 2), (128, 4), (1024, 4), (1024, 8)])
def test_slow_pairs_turn_as_their_polynomials_do(base: float, span: int, terms: int) -> None:
    frequency = inv_freq(base)
    split = split_pairs(frequency, span, terms)
    assert sorted(split.fast + split.slow) == list(range(64))
    assert len(split.fast) & (len(split.fast) - 1) == 0
    slow = frequency[list(split.slow)]
    place = torch.arange(span) - span / 2
    x = (place / (span / 2)).double()
    basis = torch.cos(torch.arange(terms)[:, None] * x.acos())
    made = coefficients(slow, span, terms).double()
    angle = slow[:, None].double() * place
    assert torch.allclose(made[0::2].T @ basis[0::2], angle.cos(), atol=TOLERANCE, rtol=0)
    assert torch.allclose(made[1::2].T @ basis[1::2], angle.sin(), atol=TOLERANCE, rtol=0)


def test_longer_spans_have_more_fast_pairs_and_polynomials_fewer() -> None:
    frequency = inv_freq(5e5)
    for terms in TERMS:
        counts = [len(split_pairs(frequency, span, terms).fast) for span in (64, 256, 1024, 4096)]
        assert counts == sorted(counts)
    counts = [len(split_pairs(frequency, 1024, terms).fast) for terms in TERMS]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 64
    assert counts[-1] < 64


def test_what_the_kernel_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="3 polynomials"):
        split_pairs(inv_freq(5e5), 64, 3)
    with pytest.raises(ValueError, match="latents of 102 numbers"):
        tiling_for(CacheGeometry(8, 128, 1, 102, 1, 64), 1, 64, 4, 3, 2)
    with pytest.raises(ValueError, match="4 original heads"):
        tiling_for(CacheGeometry(8, 128, 2, 64, 1, 64), 2, 64, 4, 3, 2)


@pytest.mark.slow
def test_kernel_matches_the_reference_in_tritons_interpreter() -> None:
    # A value head has one latent; one that gives keys to two heads; two latents.
    seeds = (4, 13, 14)
    said = run_interpreted("tests.benchmarks.latent_spans_cases", *seeds)
    found = re.findall(r"relative error (\S+), (\S+) without slow pairs", said)
    assert len(found) == len(seeds)
    assert all(float(without) > 20 * float(error) for error, without in found)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_of_the_benchmark_compile_for_hopper(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling_for(HOPPER, monkeypatch) as kernels:
        monkeypatch.setattr(
            "benchmarks.kernels.latent_spans.launch.capability_of", lambda device: HOPPER
        )
        for spans in CONFIGURATIONS:
            _launch(CASES[case], spans)
    memory = shared_memory(HOPPER)
    of_spans = [kernel for kernel in kernels if kernel.name == "span_split_kv"]
    assert len(of_spans) == len(CONFIGURATIONS)
    for spans, kernel in zip(CONFIGURATIONS, of_spans, strict=True):
        assert spans.programs * (kernel.shared + 1024) <= memory.multiprocessor, kernel
        assert not unwritten_registers(kernel.sass), kernel
