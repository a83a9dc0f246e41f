"""What fits into a GPU is trained, and what does not fit is refused with the arithmetic."""

import pytest

from tests.support.dense_models import config
from vllm_gac.errors import HealingError
from vllm_gac.healing.memory import Choice, chosen, memory
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
WHOLE, LORA = (memory(LLAMA3_8B, LLAMA3_8B, (2, 2), 512, rank) for rank in (None, 32))


def test_the_parts_of_a_model_of_llama3_8bs_shape() -> None:
    layers = LLAMA3_8B.parameters - 2 * 128256 * 4096
    assert WHOLE.trained == 16 * layers
    assert WHOLE.weights == 2 * 2 * 128256 * 4096
    assert WHOLE.teacher == LORA.weights == 2 * LLAMA3_8B.parameters
    assert LORA.trained < 2 * GB
    assert WHOLE.activations < 25 * GB


def choice(asked: str, free: float | None, on_host: float = 500) -> Choice:
    """Of `free` GB and GB of host memory."""
    given = None if free is None else round(free * GB)
    return chosen(asked, 32, WHOLE, LORA, given, on_host * GB)


def test_whole_weights_if_there_is_room_else_adapters() -> None:
    for asked, free, rank in (
        ("auto", 200, None),
        ("auto", 80, 32),
        ("lora", 200, 32),
        ("whole", None, None),
        ("auto", None, None),
    ):
        found = choice(asked, free)
        assert (found.adapter_rank, found.averages_in_host_memory) == (rank, False)


def test_averages_go_to_host_memory_if_whole_weights_fit_then() -> None:
    """An 8B model that lost nothing but its cache, on a GPU of 141 GB."""
    found = choice("auto", 141)
    assert (found.adapter_rank, found.averages_in_host_memory) == (None, True)
    assert found.memory.trained == WHOLE.trained / 2
    assert found.memory.host == WHOLE.host + WHOLE.trained / 2
    assert found == choice("whole", 141)
    assert choice("auto", 141, on_host=80).adapter_rank == 32
    with pytest.raises(HealingError, match=r"it needs 83\.8 GB there, and 80"):
        choice("whole", 141, on_host=80)


def test_several_gpus_share_all_but_embeddings_and_activations() -> None:
    four = memory(LLAMA3_8B, LLAMA3_8B, (2, 2), 512, None, processes=4)
    assert four.trained == WHOLE.trained // 4
    assert four.weights == WHOLE.weights
    assert four.teacher == pytest.approx((WHOLE.teacher - WHOLE.weights) / 4 + WHOLE.weights)
    assert 0 < four.activations - WHOLE.activations < 6 * GB
    assert four.total < 80 * GB


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    with pytest.raises(HealingError, match=r"55\.8 for what is trained.*; 75\.2 GB") as refused:
        choice("whole", 80)
    assert "give --train lora, which takes" in str(refused.value)
    with pytest.raises(HealingError, match=r"16\.1 other weights, 16\.1 the teacher"):
        choice("auto", 24)
