"""PaLU: uneven ranks, groups of any number of heads, biases, windows."""

from pathlib import Path
from typing import Any

import pytest

from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import MISTRAL, assert_same_logits, write
from tests.support.dense_models import LINEAR_ROPE, LLAMA3_ROPE, config
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.steps.inspect import inspect

MHA = config(num_attention_heads=4, num_key_value_heads=4)
GQA = config(num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        pytest.param(MHA, [([9, 16, 3, 8], [12, 5, 1, 7]), ([4] * 4, [16] * 4)], id="gs 1"),
        pytest.param(GQA, [([9, 16], [12, 31]), ([32, 32], [32, 32])], id="gs 2"),
        pytest.param(GQA, [([17], [33]), ([40], [64])], id="gs 4"),
        pytest.param(GQA, [([1], [1]), ([1, 1, 1, 1], [1, 1])], id="ranks of 1, other groups"),
        pytest.param(GQA, [([9, 7], [5, 6, 7, 8]), ([], [6, 3])], id="values finer, no keys"),
        pytest.param(GQA, [([9, 7], []), ([], [])], id="one projection"),
        pytest.param(config(), [([5, 8], [9, 4]), ([16], [20])], id="two KV heads"),
        pytest.param(
            config(attention_bias=True, num_attention_heads=8, num_key_value_heads=4),
            [([9, 16], [12, 31]), ([5, 2, 3, 4], [6, 6, 3, 16])],
            id="biases",
        ),
        pytest.param(GQA | {"attention_bias": True}, [([30, 9], []), ([], [2, 5])], id="bias, one"),
        pytest.param(
            GQA | {"model_type": "qwen2"}, [([9, 16], [12, 31]), ([9, 7], [5, 6, 7, 8])], id="Qwen2"
        ),
        pytest.param(
            GQA | {"model_type": "qwen3"}, [([9, 16], [12, 31]), ([4] * 4, [6] * 4)], id="Qwen3"
        ),
        pytest.param(GQA | MISTRAL, [([9, 16], [12, 31]), ([17], [33])], id="sliding window"),
        pytest.param(GQA | {"tie_word_embeddings": True}, [([9, 4], [6, 7])] * 2, id="tied"),
        pytest.param(GQA | {"mlp_bias": True}, [([9, 4], [6, 7])] * 2, id="MLP biases"),
        pytest.param(GQA | {"rope_parameters": LLAMA3_ROPE}, [([9, 4], [6, 7])] * 2, id="llama 3"),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_original(
    raw: dict[str, Any], layers: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    written, model = palu(raw, ranks_of(layers))
    assert_same_logits(write(tmp_path, written, model), model, "palu")


def test_the_oldest_spelling_of_scaled_rope(tmp_path: Path) -> None:
    written, model = palu(GQA | {"rope_parameters": LINEAR_ROPE}, ranks_of([([9, 4], [6, 7])] * 2))
    del written["rope_parameters"]
    written |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000.0}
    assert_same_logits(write(tmp_path, written, model), model, "palu")


def test_latents_are_cached_padded_to_the_largest_rank_of_their_layer(tmp_path: Path) -> None:
    layers = [([9, 16], [12, 31]), ([4, 3], [2, 5])]
    written, model = palu(GQA, ranks_of(layers))
    inspection = inspect(write(tmp_path, written, model))
    assert [layer["key"] for layer in inspection.layers] == [
        {"form": "latent", "heads": 2, "size": 16},
        {"form": "latent", "heads": 2, "size": 4},
    ]
    assert [layer["value"] for layer in inspection.layers] == [
        {"heads": 2, "size": 31},
        {"heads": 2, "size": 5},
    ]
    assert inspection.kv_bytes_per_token == 2 * 2 * (16 + 31 + 4 + 5)


@pytest.mark.parametrize(
    ("keys", "values", "key", "value"),
    [
        # Latent keys of single heads go with whole values. Values of groups need keys of groups.
        ([9] * 4, [16] * 4, ("latent", 4, 9), (4, 16)),
        ([9] * 2, [20] * 2, ("latent", 2, 9), (2, 20)),
        ([9] * 2, [5] * 4, ("rotary", 4, 16), (4, 5)),
        ([9] * 4, [20] * 2, ("latent", 4, 9), (2, 20)),
        # A latent as wide as its heads only makes o_proj larger, so it is not served.
        ([32] * 2, [32] * 2, ("rotary", 4, 16), (4, 16)),
        ([], [32] * 2, ("rotary", 4, 16), (4, 16)),
    ],
)
def test_the_form_that_decodes_cheapest_is_served(
    keys: list[int],
    values: list[int],
    key: tuple[str, int, int],
    value: tuple[int, int],
    tmp_path: Path,
) -> None:
    written, model = palu(GQA, ranks_of([(keys, values)] * 2))
    _, checkpoint = open_any_format(write(tmp_path, written, model))
    layer = checkpoint.layout.layers[0]
    assert (layer.key.form, layer.key.heads, layer.key.size) == key
    assert (layer.value.heads, layer.value.size) == value
