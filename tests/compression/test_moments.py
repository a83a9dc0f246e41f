"""Second moments are those of one product."""

import pytest
import torch

from vllm_gac.compression.moments import second_moment


@pytest.mark.parametrize("features", [3, 512, 1031])
def test_halves_give_the_whole(features: int) -> None:
    rows = torch.randn(7, features, dtype=torch.float64)
    torch.testing.assert_close(second_moment(rows), rows.T @ rows)
