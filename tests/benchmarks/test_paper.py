"""The arithmetic of the paper's experiments, the parser of ncu's output, and the pages."""

import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.page import origin, provenance
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import RESULTS
from benchmarks.paper.gemm import alignment, class_name
from benchmarks.paper.hardware_cases import CASES, Case
from benchmarks.paper.hardware_counters import loads
from benchmarks.paper.ncu import (
    Kernel,
    RefusedError,
    by_marker,
    kernels_of,
    load_bytes,
    opcode_of,
    profile,
)
from benchmarks.paper.palu_distribution import (
    by_energy,
    lost_energy,
    proportional_ranks,
    rounded,
    selected,
)
from benchmarks.paper.repair_tradeoff import JUDGED, mean_gain, overhead, repaired
from benchmarks.paper.sdpa_staircase import _ranges
from benchmarks.paper.timing import listed, short_name

EXPERIMENTS = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize(
    ("strategy", "percent"), [("minimal", 3.72), ("optimal", 7.20), ("predefined", 7.20)]
)
def test_memory_overhead_of_palus_heads_is_the_papers(strategy: str, percent: float) -> None:
    assert sum(reported_numbers.PALU_HEADS.values()) == 512
    assert (
        round(100 * overhead(reported_numbers.PALU_HEADS, lambda dim: repaired(dim, strategy)), 2)
        == percent
    )


@pytest.mark.parametrize(
    ("dim", "minimal", "optimal"),
    [
        (107, 112, 112),
        *((d, 120, 128) for d in range(114, 121)),
        *((d, 128, 128) for d in range(121, 126)),
    ],
)
def test_repaired_sizes_are_the_papers(dim: int, minimal: int, optimal: int) -> None:
    assert repaired(dim, "minimal") == minimal
    assert repaired(dim, "optimal") == repaired(dim, "predefined") == optimal


@pytest.mark.parametrize(("strategy", "column"), [("minimal", 1), ("optimal", 2)])
def test_roi_of_the_papers_table_8_is_the_papers(strategy: str, column: int) -> None:
    gains = [
        1 - reported_numbers.REPAIR[dim][column] / reported_numbers.REPAIR[dim][0] for dim in JUDGED
    ]
    memory = overhead(reported_numbers.PALU_HEADS, lambda dim: repaired(dim, strategy))
    assert round(sum(gains) / len(gains) / memory, 1) == reported_numbers.ROI[strategy]


def test_mean_gain_is_a_mean_of_shares() -> None:
    ms = {1: 4.0, 2: 1.0, 3: 2.0}
    assert mean_gain(ms, lambda dim: 2, [1, 3]) == pytest.approx((0.75 + 0.5) / 2)


@given(st.integers(1, 1 << 20))
def test_alignment_is_the_largest_power_of_two_up_to_64(dim: int) -> None:
    found = alignment(dim)
    assert dim % found == 0
    assert found == 64 or dim % (2 * found) != 0
    assert class_name(found) == ("odd" if dim % 2 else "64+" if dim % 64 == 0 else str(found))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40), st.integers(1, 128), st.data())
def test_proportional_ranks_spend_the_budget_exactly(
    importance: list[float], most: int, data: st.DataObject
) -> None:
    total = data.draw(st.integers(0, most * len(importance)))
    ranks = proportional_ranks(importance, most, total)
    assert sum(ranks) == total
    assert all(0 <= rank <= most for rank in ranks)


def test_proportional_ranks_are_proportional_where_no_head_is_full() -> None:
    assert proportional_ranks([1.0, 2.0, 5.0], 128, 80) == [10, 20, 50]
    assert proportional_ranks([1.0, 1.0, 98.0], 64, 100) == [18, 18, 64]
    with pytest.raises(ValueError, match="129 ranks do not fit into 1 heads of 128"):
        proportional_ranks([1.0], 128, 129)


@pytest.mark.parametrize(
    ("rank", "nearest"), [(1, 8), (107, 104), (108, 112), (125, 128), (128, 128)]
)
def test_rounding_goes_to_the_nearest_multiple(rank: int, nearest: int) -> None:
    assert rounded([rank], 8, 128) == [nearest]


@given(st.lists(st.tuples(st.integers(8, 128), st.floats(0.01, 1.0)), min_size=1, max_size=4))
def test_selected_ranks_are_the_best_aligned_ones_within_the_budget(
    heads: list[tuple[int, float]],
) -> None:
    ranks, weights = zip(*heads, strict=True)
    chosen = selected(ranks, weights, 16, 128) if sum(ranks) >= 16 * len(ranks) else None
    if chosen is None:
        return
    assert sum(chosen) <= sum(ranks)
    assert all(rank % 16 == 0 for rank in chosen)

    def distance(dims: tuple[int, ...]) -> float:
        return sum(w * abs(d - r) for d, r, w in zip(dims, ranks, weights, strict=True))

    everything = itertools.product(range(16, 129, 16), repeat=len(ranks))
    best = min(distance(dims) for dims in everything if sum(dims) <= sum(ranks))
    assert distance(tuple(chosen)) == pytest.approx(best, abs=1e-9)


def test_energy_lost_falls_from_the_weight_to_nothing() -> None:
    (curve,) = lost_energy([[3.0, 1.0, 0.0]], [2.0])
    assert curve == [2.0, 0.5, 0.0, 0.0]
    # What keeps all energy is enough, and what has none gets the least there is.
    flat, steep = [1.0] * 16, [1.0] + [0.0] * 15
    assert by_energy(lost_energy([flat, steep], [1.0, 1.0]), 8, 16, 24) == [16, 8]


RAW = """\
==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","lts__t_sectors_op_read.sum","dram__bytes_read.sum"
"","","ns","sector","byte"
"0","at::cuda::<unnamed>::spin_kernel(long)","1,000","5","0"
"1","void cutlass::Kernel2<gemm_align2>(T1::Params)","2,000","1,000","n/a"
"2","at::cuda::<unnamed>::spin_kernel(long)","1,000","5","0"
"3","void at::native::elementwise_kernel<(int)128, (int)4>(int)","3,500","7","64"
"4","nvjet_sm90","4,000","8","96"
"""
LISTING = """\
"Kernel Name","{name}"
"Address","Source","# Samples","Instructions Executed"
"0x10","      LDC R1, c[0x0][0x28]","0","8"
"0x20","@!P0  {load} R4, [R2]","{samples}","1,024"
"0x30","      {load} R8, [R2+0x10]","0","1,024"
"0x40","      HGMMA.64x128x16.F32 R4, gdesc[UR4]","0","{matrix}"
"""


def _source() -> str:
    def listing(name: str, load: str, samples: int, matrix: int) -> str:
        return LISTING.format(name=name, load=load, samples=samples, matrix=matrix)

    spin = listing("spin_kernel", "LDG.E", 0, 0)
    twice = listing("cutlass", "LDGSTS.E.LTC128B", 3, 0)
    last = listing("nvjet", "UTMALDG.3D", 0, 64)
    return spin + twice + twice + spin + listing("elementwise", "LDG.E.U16", 1, 0) + last


def test_kernels_are_read_of_ncus_pages_and_told_apart_by_the_marker() -> None:
    first, second = by_marker(kernels_of(RAW, _source()), "spin_kernel")
    assert first == [
        Kernel(
            "cutlass::Kernel2<gemm_align2>",
            {"ns": 2000.0, "l2_sectors_read": 1000.0},
            {"LDGSTS.E.LTC128B": 2048},
        )
    ]
    assert [kernel.name for kernel in second] == ["elementwise_kernel", "nvjet_sm90"]
    assert second[1].counters["dram_read"] == 96.0
    assert second[1].opcodes == {"UTMALDG.3D": 2048, "HGMMA.64x128x16.F32": 64}


def test_kernels_keep_their_counters_where_listings_are_missing() -> None:
    kernels = kernels_of(RAW, "")
    assert [kernel.counters["ns"] for kernel in kernels] == [1000, 2000, 1000, 3500, 4000]
    assert all(kernel.opcodes == {} for kernel in kernels)


def test_without_ncu_the_refusal_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(RefusedError, match="not on the PATH"):
        profile("nothing", "marker", empty)


def test_what_ncu_says_against_reading_counters_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("bin")
    script = directory / "ncu"
    script.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/bin:/usr/bin")
    with pytest.raises(RefusedError, match="ERR_NVGPUCTRPERM - no permission"):
        profile("nothing", "marker", directory)


@pytest.mark.parametrize(
    ("instruction", "opcode", "nbytes"),
    [
        ("@!P0 LDG.E.LTC128B.U16 R4, [R2]", "LDG.E.LTC128B.U16", 2),
        ("LDG.E R4, [R2]", "LDG.E", 4),
        ("LDG.E.64.CONSTANT R4, [R2]", "LDG.E.64.CONSTANT", 8),
        ("@P1 LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2]", "LDGSTS.E.BYPASS.LTC128B.128", 16),
        ("@P0 UTMALDG.3D.MULTICAST [UR8], [UR4]", "UTMALDG.3D.MULTICAST", 0),
        ("LDS.128 R4, [R2]", "LDS.128", None),
        ("HMMA.16816.F32 R4, R2, R3, R4", "HMMA.16816.F32", None),
        ("EXIT;", "EXIT", None),
    ],
)
def test_load_width_is_read_of_an_instruction(
    instruction: str, opcode: str, nbytes: int | None
) -> None:
    assert opcode_of(instruction) == opcode
    assert load_bytes(opcode) == nbytes


@pytest.mark.parametrize(
    ("opcodes", "told"),
    [
        ({"UTMALDG.3D": 4, "LDG.E": 100}, "TMA"),
        ({"LDG.E.U16": 99, "LDG.E": 1}, "2 B"),
        ({"LDG.E.U16": 30, "LDG.E.128": 70}, "16 B, 2 B"),
        ({"HMMA.16816.F32": 1}, None),
    ],
)
def test_loads_are_told_by_what_is_common(opcodes: dict[str, int], told: str | None) -> None:
    assert loads(Counter(opcodes)) == told


def test_kernel_names_are_short() -> None:
    name = "void at::native::(anonymous namespace)::elementwise_kernel<128, 4, x>(int, y)"
    assert short_name(name) == "elementwise_kernel"
    assert short_name("nvjet_sm90_hsh(int)") == "nvjet_sm90_hsh"
    assert len(short_name("x" * 200)) == 80
    assert listed([("a", 1.4), ("b", 2.0), ("a", 1.2)]) == "2 x `a` 3 us<br>1 x `b` 2 us"


def test_ranges_are_told_in_brief() -> None:
    assert _ranges([64, 72, 97, 98, 99, 160]) == "64, 72, 97-99, 160"


def test_cases_count_what_they_move_and_multiply() -> None:
    product = Case(2, 3, 5)
    assert (product.flops, product.nbytes) == (60, 2 * (10 + 15 + 6))
    attention = Case(dim=112)
    assert attention.nbytes == 4 * 4 * 2048 * 32 * 112 * 2
    assert attention.flops == 4 * 4 * 32 * 2048**2 * 112
    assert len({case.label for case in CASES}) == len(CASES)
    assert [Case(4096, 4092, 4096).swept, Case(4096, 4096, 4095).swept, attention.swept] == [
        4092, 4095, 112,
    ]  # fmt: skip


def test_every_experiment_has_results() -> None:
    assert len(EXPERIMENTS) == 7


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_pages_are_drawn_of_the_committed_numbers(name: str) -> None:
    draw: Callable[..., tuple[str, object]] = importlib.import_module(
        f"benchmarks.paper.{name}"
    ).draw
    page, _ = draw(json.loads((RESULTS / f"{name}.json").read_text()))
    assert (RESULTS / f"{name}.md").read_text().endswith(page)
    assert "nan" not in page


def test_a_page_names_the_compiler_of_its_kernels() -> None:
    about = provenance("python -m x", "cpu", "abc")
    assert origin(about).endswith(f"triton {metadata.version('triton')}, commit abc, `python -m x`")
