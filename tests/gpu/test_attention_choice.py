"""The choice of the kernels that serve a layer. It needs no torch."""

from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.gpu.attention_choice import (
    Gpu,
    Kernels,
    at_or_above,
    measured_backend,
    prefill_times,
    select,
    widths,
)
from vllm_gac.gpu.profile import Dtype, GpuProfile, PrefillTime
from vllm_gac.gpu.profile_files import read_profile, shipped_profiles
from vllm_gac.layout.cache_geometry import CacheGeometry

AMPERE = Gpu((8, 0), ("FA2", "xformers"))
HOPPER = Gpu((9, 0), ("FA2", "FA3", "FA4", "xformers"))
BLACKWELL = Gpu((10, 0), ("FA2", "FA4"))
TURING = Gpu((7, 5), ())
SIZES = (64, 80, 96, 112, 128)


def heads(r_k: int, r_v: int, key: int = 8, value: int = 8, latent: bool = False) -> CacheGeometry:
    form: Any = "latent" if latent else "rotary"
    return CacheGeometry(32, 128 if latent else r_k, key, r_k, value, r_v, form)


def profile(
    decode: dict[str, float] | None = None, **prefill: dict[tuple[int, int], tuple[float, float]]
) -> GpuProfile:
    """An H200's profile with decode times at (96, 96), and {kernel: {sizes: (fresh, cached)}}."""
    plain = next(p for p in read_profile("h200").decode if p.form == "rotary")
    points = [
        plain.model_copy(
            update={
                "kernel": kernel, "key_heads": 8, "value_heads": 8, "key_size": 96,
                "value_size": 96, "microseconds": time,
            }
        )
        for kernel, time in (decode or {}).items()
    ]  # fmt: skip
    times = [
        PrefillTime(
            kernel=kernel, context=context, query_heads=32, kv_heads=8, key_size=sizes[0],
            value_size=sizes[1], batch=4, length=2048, microseconds=time,
        )
        for kernel, by in prefill.items()
        for sizes, both in by.items()
        for context, time in zip(("fresh", "cached"), both, strict=True)
    ]  # fmt: skip
    changes = {"decode": points, "prefill_kernels": times}
    return read_profile("h200").model_copy(
        update=changes | {"gpu": f"made up {hash(str(changes))}"}
    )


# ---- sizes that kernels support --------------------------------------------------------------


@pytest.mark.parametrize(("r_k", "r_v"), list(product(SIZES, SIZES)))
def test_flash_attention_3_pads_unequal_heads_and_4_does_not(r_k: int, r_v: int) -> None:
    wide = max(r_k, r_v)
    assert widths("FA3", (r_k, r_v), (9, 0)) == (wide, wide)
    assert widths("FA2", (r_k, r_v), (8, 0)) == (wide, wide)
    assert widths("FA4", (r_k, r_v), (9, 0)) == (r_k, r_v)
    assert widths("xformers", (r_k, r_v), (8, 6)) == (r_k, r_v)


@pytest.mark.parametrize(
    ("kernel", "capability", "sizes", "runs_at"),
    [
        ("FA3", (9, 0), (192, 128), (192, 128)),
        ("FA3", (9, 0), (48, 64), (48, 64)),
        ("FA3", (9, 0), (128, 192), (192, 192)),
        # What FlashAttention 4 gets wrong on Hopper.
        *(
            ("FA4", (9, 0), sizes, None)
            for sizes in ((48, 128), (64, 160), (72, 64), (64, 72), (264, 264))
        ),
        # GPUs that kernels are not for.
        ("FA3", (8, 0), (64, 64), None),
        ("FA4", (8, 0), (64, 64), None),
        ("FA3", (10, 0), (64, 64), None),
        ("FA4", (10, 0), (192, 192), None),
        ("FA2", (7, 5), (64, 64), None),
    ],
)
def test_kernels_get_supported_head_sizes(
    kernel: str, capability: tuple[int, int], sizes: Any, runs_at: Any
) -> None:
    assert widths(kernel, sizes, capability) == runs_at


kernels = st.sampled_from(["FA2", "FA3", "FA4", "xformers"])
sizes = st.integers(1, 32).map(lambda n: 8 * n)
capabilities = st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])


@given(kernels, sizes, sizes, capabilities)
def test_views_over_a_packed_row_hold_what_kernels_run_at(
    kernel: str, r_k: int, r_v: int, capability: tuple[int, int]
) -> None:
    at = widths(kernel, (r_k, r_v), capability)
    if at is not None:
        assert r_k <= at[0] <= r_k + r_v
        assert r_v <= at[1] <= r_k + r_v
        assert at[0] % 8 == at[1] % 8 == 0


# ---- without a profile -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "gpu", "expected"),
    [
        (heads(128, 128), HOPPER, Kernels("stock", "stock", "stock", False)),
        (heads(96, 96), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(96, 64), HOPPER, Kernels("gac", "gac", "FA4", False)),
        (heads(64, 96), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(72, 64), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(44, 36), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(96, 96), AMPERE, Kernels("stock", "stock", "stock", False)),
        (heads(80, 80), AMPERE, Kernels("gac", "gac", "FA2", False)),
        (heads(96, 64), AMPERE, Kernels("gac", "gac", "FA2", False)),
        (heads(96, 64), BLACKWELL, Kernels("gac", "gac", "FA4", False)),
        (heads(160, 128), BLACKWELL, Kernels("gac", "gac", "FA2", False)),
        (heads(96, 64), Gpu((8, 0), ("xformers",)), Kernels("gac", "gac", "xformers", False)),
        (heads(96, 64), TURING, None),
        (heads(512, 64), HOPPER, None),
        # What vLLM cannot serve: values and keys that heads share, and latents, rebuilt to 128.
        (heads(128, 128, value=4), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(192, 128, key=4, value=4), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(64, 128, latent=True), HOPPER, Kernels("gac", "gac", "FA3", False)),
        (heads(64, 64, latent=True), HOPPER, Kernels("gac", "gac", "FA4", False)),
    ],
)
def test_default_kernels_follow_the_compute_capability(
    layer: CacheGeometry, gpu: Gpu, expected: Kernels | None
) -> None:
    assert select(layer, gpu, None) == expected


# ---- by a profile ----------------------------------------------------------------------------


def test_fastest_supported_kernel_prefills() -> None:
    known = profile(FA3={(96, 96): (200, 210), (96, 64): (250, 260)}, FA4={(96, 64): (230, 255)})
    assert prefill_times(known)["FA3"][96, 64] == pytest.approx((250 * 260) ** 0.5)
    assert select(heads(96, 64), HOPPER, known) == Kernels("gac", "gac", "FA4", True)
    assert select(heads(96, 64), Gpu((9, 0), ("FA3",)), known) == Kernels("gac", "gac", "FA3", True)
    slower = profile(FA3={(96, 64): (250, 260)}, FA4={(96, 64): (250, 280)})
    assert select(heads(96, 64), HOPPER, slower) == Kernels("gac", "gac", "FA3", True)


def test_unmeasured_sizes_use_the_next_larger() -> None:
    assert at_or_above({(64, 64): 1.0, (96, 64): 2.0, (96, 96): 3.0}, (72, 64)) == 2.0
    assert at_or_above({(64, 64): 1.0}, (64, 72)) is None
    known = profile(FA3={(96, 96): (200, 200)}, FA4={(96, 64): (190, 190)})
    assert select(heads(80, 64), HOPPER, known) == Kernels("gac", "gac", "FA4", True)
    # FA4 does not support a key size of 72, and no size above (96, 96) was measured.
    assert select(heads(72, 64), HOPPER, known) == Kernels("gac", "gac", "FA3", True)
    assert select(heads(128, 96), HOPPER, known) == Kernels("gac", "gac", "FA4", False)


@pytest.mark.parametrize(
    ("decode", "prefill", "backend"),
    [
        ((200, 260), (210, 220), "gac"),  # faster for fresh and cached tokens
        ((200, 260), (230, 220), "gac"),  # loses less than it gains
        ((200, 260), (300, 220), "stock"),
        ((200, 202), (220, 220), "stock"),  # within the noise, vLLM's own kernel is chosen
        ((260, 200), (220, 220), "stock"),
    ],
)
def test_faster_backend_is_selected(
    decode: tuple[float, float], prefill: tuple[float, float], backend: str
) -> None:
    known = profile(
        dict(zip(("gac", "stock"), decode, strict=True)),
        FA3={(96, 96): (prefill[0],) * 2},
        stock={(96, 96): (prefill[1],) * 2},
    )
    kernels = select(heads(96, 96), HOPPER, known)
    assert kernels is not None
    assert (kernels.backend, kernels.measured) == (backend, True)
    assert kernels.prefill == ("FA3" if backend == "gac" else "stock")
    assert select(heads(96, 96, value=4), HOPPER, known) == Kernels("gac", "gac", "FA3", True)


def test_fp8_cache_adds_the_cost_of_gathering() -> None:
    """Ours gains 5 % in decoding. Reading rows that were gathered takes 40 us more than fresh ones.

    With an FP8 cache vLLM's decode takes three times as long, and its prefill is unknown.
    """
    decode, prefill = {"gac": 200, "stock": 210}, {"FA3": (220, 220), "stock": (220, 220)}
    for rows, in_fp8 in (
        ({"xformers": (1000, 1040)}, Kernels("stock", "stock", "stock", True)),
        ({"xformers": (1000, 1001)}, Kernels("gac", "gac", "FA3", True)),
        ({}, Kernels("gac", "gac", "FA3", False)),  # by default: FA3 of vLLM would pad
    ):
        at_96: Any = {kernel: {(96, 96): both} for kernel, both in (prefill | rows).items()}
        known = profile(decode, **at_96)
        slow = [
            point.model_copy(update={"dtype": "fp8", "microseconds": time})
            for point, time in zip(known.decode, (200, 630), strict=True)
        ]
        known = known.model_copy(update={"decode": [*known.decode, *slow]})
        assert select(heads(96, 96), HOPPER, known) == Kernels("gac", "gac", "FA3", True)
        assert select(heads(96, 96), HOPPER, known, cache="fp8") == in_fp8


@pytest.mark.parametrize("gpu", shipped_profiles())
@pytest.mark.parametrize("cache", get_args(Dtype))
def test_predictions_use_the_backend_that_serves(gpu: str, cache: Dtype) -> None:
    known = read_profile(gpu)
    for size in range(16, 257, 16):
        chosen = select(heads(size, size), HOPPER, known, cache=cache)
        assert chosen is not None
        if chosen.measured:
            assert measured_backend(heads(size, size), known, cache) in (None, chosen.backend)
    assert measured_backend(heads(128, 128), known, cache) == "gac"
    assert measured_backend(heads(64, 64, latent=True), known, cache) == "gac"
    alike = profile(
        {"gac": 200, "stock": 200}, FA3={(96, 96): (200, 200)}, stock={(96, 96): (200, 200)}
    )
    assert measured_backend(heads(96, 96), alike) == "stock"
    assert measured_backend(heads(96, 96), profile({"gac": 200})) is None


def test_default_is_kept_without_times_of_stock_kernels() -> None:
    known = profile({"gac": 200}, FA3={(128, 128): (200, 200)})
    assert select(heads(128, 128), HOPPER, known) == Kernels("stock", "stock", "stock", False)
    assert select(heads(96, 96), HOPPER, known) == Kernels("gac", "gac", "FA3", True)


@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from([1, 2, 4, 8]))
def test_selection_is_independent_of_tensor_parallel_size(r_k: int, r_v: int, tp: int) -> None:
    whole_layer = heads(r_k, r_v)
    rank = CacheGeometry(32 // tp, r_k, 8 // tp, r_k, 8 // tp, r_v)
    for known in (None, read_profile("h200")):
        assert select(rank, HOPPER, known) == select(whole_layer, HOPPER, known)


def test_every_head_size_has_a_kernel_on_every_gpu() -> None:
    for gpu, r_k, r_v in product((AMPERE, HOPPER, BLACKWELL), range(8, 257, 8), range(8, 257, 8)):
        assert select(heads(r_k, r_v), gpu, None) is not None
