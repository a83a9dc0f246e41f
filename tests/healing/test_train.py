"""How a step's sequences are split for the memory that there is."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.healing.train import even_parts


@given(count=st.integers(1, 40), length=st.integers(1, 9), tokens=st.integers(1, 100))
def test_parts_are_few_and_even_and_within_the_limit(count: int, length: int, tokens: int) -> None:
    rows = torch.arange(count * length).view(count, length)
    parts = even_parts(rows, tokens)
    assert torch.equal(torch.cat(list(parts)), rows)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    most = max(1, tokens // length)
    assert max(sizes) <= most
    assert (len(parts) - 1) * most < count
