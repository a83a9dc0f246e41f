"""The page of caches of four bits, with invented results."""

from benchmarks.engines.four_bits import loss, page

ABOUT = {"command": "python", "commit": "0", "date": "today", "machine": "GPU"}


def test_the_page_says_what_fits_what_is_lost_and_what_failed() -> None:
    base, lower = [-1.0, -2.0, -3.0], [-1.25, -2.25, -3.0]
    dense = {"model": "dense", "attention": ["FLASH_ATTN"]}
    rows = [
        dense | {"types": "bf16+bf16", "kv_tokens": 1000} | loss(base, base),
        dense | {"types": "fp8+fp8", "kv_tokens": 2000} | loss(lower, base),
        {"model": "dense", "types": "fp8+turboquant_4bit_nc", "error": "ValueError: no"},
    ]
    text = page({**ABOUT, "rows": rows})
    row = "| dense | fp8+fp8 | FLASH_ATTN | 2,000 | 2.00x | 8.7291 | +0.1667 ± 0.0833 | 0.1667 |"
    assert row in text
    assert "dense fp8+turboquant_4bit_nc failed: ValueError: no" in text
