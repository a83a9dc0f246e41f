"""Directories of every format are inspected by their headers. Invalid ones are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.model_files import (
    GAC_LAYERS,
    Tensors,
    config,
    gac_config,
    reshaped,
    tensors_of,
    write_model,
)
from vllm_gac.checkpoint.open import faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.steps.inspect import inspect
from vllm_gac.steps.verify import verify


def test_a_dense_directory(tmp_path: Path) -> None:
    inspection = inspect(write_model(tmp_path, config())).as_json()
    layer = {
        "key": {"form": "rotary", "heads": 2, "size": 16},
        "value": {"heads": 2, "size": 16},
        "intermediate_size": 48,
        "ranks": {},
    }
    assert inspection == {
        "format": "dense",
        "layers": [layer, layer],
        "parameters": 2 * (32 * 64 * 2 + 2 * 32 * 32 + 3 * 32 * 48 + 64) + 32 + 2 * 64 * 32,
        "kv_bytes_per_token": 2 * (2 * 16 + 2 * 16) * 2,
        "dims": 6,
        "aligned_dims": 6,
        "aligned_fraction": 1.0,
        "measured": None,
    }


@pytest.mark.parametrize("shards", [1, 4])
def test_a_gac_directory(shards: int, tmp_path: Path) -> None:
    inspection = inspect(write_model(tmp_path, gac_config(), shards=shards))
    assert inspection.format == "gac"
    assert inspection.layers == [GAC_LAYERS[0], GAC_LAYERS[1] | {"ranks": {}}]
    assert inspection.kv_bytes_per_token == 2 * ((2 * 12 + 24) + (2 * 8 + 2 * 8))
    # All dims are aligned except the key size of 12.
    assert (inspection.dims, inspection.aligned_dims) == (7, 6)
    assert inspection.aligned_fraction == pytest.approx(6 / 7)


MEASURED = {
    "ratio": 1.08,
    "interval": [1.07, 1.1],
    "divergence": 0.05,
    "agreement": 0.9,
    "tokens": 4088,
}


@pytest.mark.parametrize(
    "changed",
    [{"ratio": -1.0}, {"interval": [1.0]}, {"agreement": 2.0}, {"more": 1}, {"tokens": "7"}],
)
def test_measured_losses_are_shown_if_they_are_valid(
    changed: dict[str, object], tmp_path: Path
) -> None:
    raw = gac_config()
    raw["gac"]["source"] = {"measured": MEASURED}
    assert inspect(write_model(tmp_path / "good", raw)).as_json()["measured"] == MEASURED
    raw["gac"]["source"] = {"measured": MEASURED | changed}
    assert inspect(write_model(tmp_path / "bad", raw)).measured is None


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        (2, 1, (1, 16)),  # LLM-Pruner: whole groups of heads
        (4, 1, (1, 16)),
        (4, 2, (2, 10)),  # smaller values
        (4, 2, (1, 20)),  # two key heads share a value head
        (6, 2, (2, 16)),
    ],
)
def test_pruned_heads_are_read_from_the_tensors(
    query: int, key: int, value: tuple[int, int], tmp_path: Path
) -> None:
    """The first layer has so many query and key heads of 16, and value heads (number, size)."""
    shapes = {
        "q": (query * 16, 32),
        "k": (key * 16, 32),
        "v": (value[0] * value[1], 32),
        "o": (32, query * value[1]),
    }
    first = {
        f"model.layers.0.self_attn.{x}_proj.weight": ("BF16", shape) for x, shape in shapes.items()
    }
    directory = write_model(tmp_path, config(), lambda tensors: tensors.update(first))
    model_format, checkpoint = open_any_format(directory)
    assert model_format == "hf-pruned"
    assert list(faults(checkpoint)) == []
    pruned, other = checkpoint.layout.layers
    assert (pruned.query_heads, pruned.key.heads, pruned.key.size) == (query, key, 16)
    assert (pruned.value.heads, pruned.value.size) == value
    assert (other.query_heads, other.key.heads, other.value.heads) == (4, 2, 2)
    assert checkpoint.layout.softmax_scale == 0.25


def test_a_narrower_model_and_a_grown_vocabulary_are_read_from_the_embedding(
    tmp_path: Path,
) -> None:
    smaller = tensors_of(config(hidden_size=24, vocab_size=70))
    directory = write_model(tmp_path, config(), lambda tensors: tensors.update(smaller))
    model_format, checkpoint = open_any_format(directory)
    assert model_format == "hf-pruned"
    assert (checkpoint.layout.hidden_size, checkpoint.layout.vocab_size) == (24, 70)
    assert list(faults(checkpoint)) == []


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (reshaped("model.layers.0.self_attn.q_proj.weight", 60, 32), "layers.0.self_attn.q_proj"),
        (reshaped("model.layers.1.self_attn.k_proj.weight", 24, 32), "layers.1.self_attn.k_proj"),
        (reshaped("model.layers.0.self_attn.k_proj.weight", 48, 32), "layers.0.self_attn.k_proj"),
        (reshaped("model.layers.0.self_attn.o_proj.weight", 32, 62), "layers.0.self_attn.o_proj"),
        (reshaped("model.layers.0.self_attn.v_proj.weight", 33, 32), "layers.0.self_attn.v_proj"),
        (reshaped("model.layers.0.self_attn.v_proj.weight", 48, 32), "layers.0.self_attn.v_proj"),
        (reshaped("model.layers.0.self_attn.q_proj.weight", 2048), "layers.0.self_attn.q_proj"),
        (reshaped("model.layers.0.self_attn.q_proj.weight", 0, 32), "layers.0.self_attn.q_proj"),
        (reshaped("model.embed_tokens.weight", 64), "model.embed_tokens"),
        # The layout can be read, but another tensor contradicts it.
        (reshaped("model.layers.0.mlp.gate_proj.weight", 40, 32), "layers.0.mlp.up_proj"),
        (reshaped("model.layers.0.mlp.down_proj.weight", 48, 32), "layers.0.mlp.down_proj"),
        (reshaped("model.layers.1.input_layernorm.weight", 31), "layers.1.input_layernorm"),
        (reshaped("lm_head.weight", 63, 32), "lm_head"),
    ],
)  # fmt: skip
def test_shapes_that_make_no_sense_are_refused_naming_the_tensor(
    change: Callable[[Tensors], object], tensor: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path, config(), change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{tensor}\.weight: shape"):
        inspect(directory)
    assert not verify(directory).ok


def test_shapes_without_the_tensor_they_would_be_read_from(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        reshaped("model.layers.0.mlp.gate_proj.weight", 40, 32)(tensors)
        tensors.pop("model.layers.1.self_attn.v_proj.weight")

    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight: missing"
    ):
        inspect(write_model(tmp_path, config(), change))


def test_a_faulty_directory_is_not_described_and_verify_is_pointed_to(tmp_path: Path) -> None:
    write_model(tmp_path, gac_config(), lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: .* --verify"):
        inspect(tmp_path)


def test_verify_reads_values_and_inspect_does_not(tmp_path: Path) -> None:
    write_model(tmp_path, config(), fill={"model.norm.weight": b"\xff\xff"})
    assert inspect(tmp_path).format == "dense"
    (fault,) = verify(tmp_path).faults
    assert fault.startswith(f"{tmp_path / 'model.safetensors'}: model.norm.weight: contains NaN")
