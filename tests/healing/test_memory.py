"""What fits into a GPU is trained, and what does not fit is refused with the arithmetic."""

from pathlib import Path

import pytest

from benchmarks.common.llama3_8b import write_models
from tests.support.dense_models import config
from vllm_gac.errors import HealingError
from vllm_gac.healing.memory import chosen_rank, memory, tokens_at_once
from vllm_gac.layout.dims import layout_of

GB = 10**9
LLAMA3_8B = layout_of(
    config(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
)
# GB that healing took at its most at 8B's shape, of which 80 % of the parameters are kept: the GPU
# and how many of them, the rank of adapters. The pages that have these
# numbers are of commit 60b1e14 (benchmarks/results/quality).
MEASURED = (
    ("H200", 1, None, 114.26),
    ("H200", 1, 32, 38.94),
    ("H100", 1, 32, 41.03),
    ("H100", 2, None, 71.85),
    ("H100", 2, 32, 40.65),
)
WHOLE, LORA = (memory(LLAMA3_8B, LLAMA3_8B, (2, 2), 8192, rank) for rank in (None, 32))


def test_whole_weights_if_there_is_room_else_adapters() -> None:
    assert chosen_rank("auto", 32, WHOLE, LORA, 200 * GB) is None
    assert chosen_rank("auto", 32, WHOLE, LORA, 80 * GB) == 32
    assert chosen_rank("lora", 32, WHOLE, LORA, 200 * GB) == 32
    assert chosen_rank("full", 32, WHOLE, LORA, None) is None
    assert chosen_rank("auto", 32, WHOLE, LORA, None) is None


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    with pytest.raises(HealingError, match=r"111\.7 .* 75\.2 GB") as refused:
        chosen_rank("full", 32, WHOLE, LORA, 80 * GB)
    assert "--train lora" in str(refused.value)
    with pytest.raises(HealingError, match=r"16\.1 .*16\.1 "):
        chosen_rank("auto", 32, WHOLE, LORA, 24 * GB)


def test_what_was_measured_is_expected_with_some_to_spare(tmp_path: Path) -> None:
    layouts = write_models(tmp_path)
    for gpu, processes, rank, measured in MEASURED:
        needed = memory(layouts["gac"], layouts["dense"], (2, 2), 8192, rank, processes)
        assert 3 * GB < needed.total - GB * measured < 10 * GB, (gpu, processes, rank)


def test_small_models_run_more_tokens_at_once_within_an_eighth_of_the_gpu() -> None:
    small = layout_of(config(hidden_size=1024, intermediate_size=2432, num_hidden_layers=12))
    tokens = tokens_at_once(small, small, (40 * GB, 80 * GB))
    assert 8192 < tokens < 65536
    twice = (tokens, 2 * tokens)
    less, more = (memory(small, small, (2, 2), n, None).activations for n in twice)
    assert 9.9 * GB < more - less <= 10 * GB
    assert tokens_at_once(LLAMA3_8B, LLAMA3_8B, (80 * GB, 80 * GB)) == 8192
    assert tokens_at_once(small, small, (8 * GB, 8 * GB)) == 8192
    assert tokens_at_once(small, small, (39 * GB, 80 * GB)) == 8192
    assert tokens_at_once(small, small, None) == 8192
    assert tokens_at_once(small, small, (800 * GB, 800 * GB)) == 65536
