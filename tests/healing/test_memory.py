"""What fits into a GPU is trained, and what does not fit is refused with the arithmetic."""

from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.common.llama3_8b import DENSE, write_models
from tests.support.dense_models import config, random_weights
from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.compression.reference_model import Reference, layer_forward
from vllm_gac.errors import HealingError
from vllm_gac.healing.memory import (
    _KEPT_CHANNEL,
    _KEPT_STATE,
    chosen_rank,
    kept_layers,
    memory,
    tokens_at_once,
)
from vllm_gac.layout.dims import layout_of

GB = 10**9
_FP32_ON_CPU = (torch.float32, torch.device("cpu"))
LLAMA3_8B = layout_of(DENSE)
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


def test_gradients_and_moments_are_of_what_is_trained() -> None:
    rest, names = LLAMA3_8B.parameters, [n for n in LLAMA3_8B.tensors() if "self_attn" in n]
    attention = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    needed, lora = (
        memory(LLAMA3_8B, LLAMA3_8B, (2, 2), 8192, rank, trained=names.__contains__)
        for rank in (None, 32)
    )
    assert (needed.trained, needed.weights) == (16 * attention, 2 * (rest - attention))
    assert (lora.trained, lora.weights) == (16 * 32 * 32 * (4 * 4096 + 2 * 5120), 2 * rest)


def test_memory_that_does_not_fit_is_refused_with_its_parts() -> None:
    with pytest.raises(HealingError, match=r"111\.7 .* 75\.2 GB") as refused:
        chosen_rank("full", 32, WHOLE, LORA, 80 * GB)
    assert "--train lora" in str(refused.value)
    with pytest.raises(HealingError, match=r"16\.1 .*16\.1 "):
        chosen_rank("auto", 32, WHOLE, LORA, 24 * GB)


def test_expected_activations_of_a_layer() -> None:
    layout = layout_of(config(hidden_size=256, intermediate_size=1024, vocab_size=64))
    weights = random_weights(layout.tensors().items())
    layer = read_layer(layout, weights.__getitem__, 0)
    bf16 = {name: tensor.bfloat16().requires_grad_() for name, tensor in layer.items()}
    model = Reference(layout, torch.ones(layout.head_dim // 2), 1e-6, None, *_FP32_ON_CPU)
    per_token = _saved(model, bf16, 128) - _saved(model, bf16, 64)
    expected = 64 * (_KEPT_STATE * 256 + _KEPT_CHANNEL * 1024)
    assert 0.75 * expected < per_token < expected


def _saved(model: Reference, weights: dict[str, torch.Tensor], tokens: int) -> int:
    """Bytes that a layer keeps for the backward pass of so many tokens."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    entering = torch.randn(1, tokens, model.layout.hidden_size, requires_grad=True)
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ):
        layer_forward(model, model.layout.layers[0], weights, entering)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_layers_are_kept_in_nine_tenths_of_the_room_that_is_left() -> None:
    tokens = 8192
    layer = tokens * (_KEPT_STATE * 4096 + _KEPT_CHANNEL * 14336) + 2 * 218_103_808

    def kept(free: int | None) -> int:
        return kept_layers(LLAMA3_8B, LORA, tokens, free)

    assert kept(None) == kept(LORA.total) == 0
    assert kept(round((LORA.total + 5.1 * layer / 0.9) / 0.94)) == 5
    assert kept(1000 * GB) == 32


def test_expected_memory_exceeds_the_measured(tmp_path: Path) -> None:
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
