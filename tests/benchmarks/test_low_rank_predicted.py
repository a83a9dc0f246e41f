"""Times of low-rank linears are predicted from others: what is left out each time."""

import pytest

from benchmarks.kernels.low_rank_predicted import page, rows
from vllm_gac.gpu.latency.gemm import roofline
from vllm_gac.gpu.profile import LowRankTime
from vllm_gac.gpu.profile_files import read_profile

H200 = read_profile("h200")


def time(tokens: int, out: int, in_size: int, rank: int, factor: float) -> LowRankTime:
    """Both factors are launches of our kernel at one token: this is their law, times a factor."""
    law = sum(2.0 + 1.1 * roofline(H200).gemm(1, n, k) for n, k in ((rank, in_size), (out, rank)))
    return LowRankTime(
        tokens=tokens,
        in_size=in_size,
        out_sizes=[out],
        ranks=[rank],
        is_gated=False,
        microseconds=factor * law,
    )


def test_a_time_is_predicted_by_those_of_other_shapes() -> None:
    times = [time(1, 4096, 4096, 1600, 1), time(1, 4096, 14336, 2432, 1)]
    odd = time(1, 2048, 8192, 512, 2)  # twice as long as the others say
    profile = H200.model_copy(update={"low_rank": [*times, odd]})
    found = list(rows(profile))
    assert found[-1]["without its shape"] == pytest.approx(-0.5, abs=0.01)
    assert found[-1]["of all"] > -0.5
    # All are of one token: without these there is nothing but GEMMs.
    assert all(row["without its tokens"] == row["as GEMMs"] for row in found)
    assert all(row["kernel"] for row in found)
    about = {"gpu": "H200", "measured": "then", "times": "made up"}
    result = {"date": "d", "commit": "c", "command": "x", "profile": about, "rows": found}
    assert "| 2048 | 8192 | 512 | 1 | " in page(result)
    assert "| all | 3 | " in page(result)
