"""Layers are read as they are stored, by one thread or by several."""

from pathlib import Path

import torch

from tests.support.dense_models import config, write
from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.checkpoint.open import open_checkpoint


def test_a_layer_read_for_a_gpu_equals_the_stored_one(tmp_path: Path) -> None:
    write(tmp_path / "model", config())
    checkpoint = open_checkpoint(tmp_path / "model")
    with checkpoint.reader() as read:
        expected = read_layer(checkpoint.layout, read, 1)
        found = read_layer(checkpoint.layout, read, 1, "cuda:0")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
