"""Every number that an fp8 cache can hold comes out of the decode kernel as it is.

    python -m tests.kernels.fp8_codes [gpu]

checks it in Triton's interpreter (TRITON_INTERPRET=1), or on a GPU.
"""

import sys

import torch

from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.layout.cache_geometry import CacheGeometry

CODES = 256


def check(device: str) -> None:
    """A sequence of one token has that token's value as output: here, one column for each code."""
    geometry = CacheGeometry(2, 32, 1, 32, 1, CODES)
    cache = torch.zeros(1, 1, 16, 32 + CODES, dtype=torch.uint8)
    cache[0, 0, 0, 32:] = torch.arange(CODES)
    cache = cache.view(torch.float8_e4m3fn).to(device)
    output = torch.zeros(1, 2, CODES, dtype=torch.float16, device=device)
    decode_attention(
        torch.ones(1, 2, 32, dtype=torch.float16, device=device),
        cache,
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.ones(1, dtype=torch.int32, device=device),
        geometry,
        1.0,
        output,
        decode_scratch(geometry, 1, torch.device(device)),
    )
    expected = cache[0, 0, 0, 32:].to(torch.float16).expand(2, -1)
    is_nan = expected.isnan()
    assert is_nan.sum() == 2 * 2  # two codes, two heads
    if device == "cuda":  # the interpreter knows no NaN in e4m3
        assert torch.equal(output[0].isnan(), is_nan)
    torch.testing.assert_close(output[0][~is_nan], expected[~is_nan], rtol=0, atol=0)


if __name__ == "__main__":
    check("cuda" if sys.argv[1:] == ["gpu"] else "cpu")
    print("all codes agree")
