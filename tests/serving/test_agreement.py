"""Serves layers of every shape that the format allows, and compares with the fp32 reference."""

import re
from pathlib import Path

import pytest

from tests.serving.agreement import CHUNKED, assert_agrees_with_reference
from tests.serving.models import HETEROGENEOUS, MINISTRAL, layer, write_model
from tests.serving.server import serve
from tests.support.dense_models import LLAMA3_ROPE
from vllm_gac.alignment.rules import padded_layout

pytestmark = pytest.mark.slow

# Of every input of a layer, whose down factors are one GEMM.
LOW_RANK = {
    f"self_attn.{name}_proj": rank for name, rank in zip("qkvo", (96, 64, 72, 120), strict=True)
}
LOW_RANK |= {f"mlp.{name}_proj": rank for name, rank in (("gate", 104), ("up", 88), ("down", 96))}


def test_every_layer_shape_agrees_with_the_reference(tmp_path: Path) -> None:
    layout = write_model(tmp_path / "model", HETEROGENEOUS, **MINISTRAL)
    # So many layers round differently in 16 bits from CPU to CPU.
    flags = ("--load-format", "gac", "--dtype", "float32", *CHUNKED)
    with serve(tmp_path / "model", tmp_path / "log", *flags) as server:
        assert_agrees_with_reference(server, tmp_path / "model")
        info = next(x for x in server.metrics().splitlines() if "cache_config_info{" in x)
    blocks = int(re.search(r'num_gpu_blocks="(\d+)"', info)[1])  # type: ignore[index]
    block_size = int(re.search(r'[^_]block_size="(\d+)"', info)[1])  # type: ignore[index]
    bytes_per_token = 4 * sum(
        x.key.heads * x.key.size + x.value.heads * x.value.size
        for x in padded_layout(layout, "minimal").layers
    )
    assert blocks == 2**30 // (block_size * bytes_per_token)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_normed_latents_on_two_ranks_agree_with_the_reference(
    tmp_path: Path, kv_heads: int
) -> None:
    """Each rank has two latents, or both have a copy of the only one."""
    layers = [
        layer(("latent", kv_heads, 32), (kv_heads, 48), 256, {"mlp.down_proj": 64}),
        layer(("latent", kv_heads, 27), (1, 64), 512, {"self_attn.k_proj": 20}),  # padded
        layer(("rotary", kv_heads, 48), (kv_heads, 32), 512),
    ]
    write_model(tmp_path / "model", layers, model_type="qwen3", num_key_value_heads=kv_heads)
    flags = ("--load-format", "gac", "--dtype", "float32", "--tensor-parallel-size", "2", *CHUNKED)
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    with serve(tmp_path / "model", tmp_path / "log", *flags, env=env) as server:
        assert_agrees_with_reference(server, tmp_path / "model")


def test_llama3_rope_scaling_and_biases_of_factors_agree_with_the_reference(tmp_path: Path) -> None:
    write_model(
        tmp_path / "model",
        [
            layer(("rotary", 4, 64), (4, 64), 512, LOW_RANK),
            layer(("latent", 4, 32), (4, 64), 384),
        ],
        rope_scaling=LLAMA3_ROPE,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    with serve(tmp_path / "model", tmp_path / "log", "--load-format", "gac", *CHUNKED) as server:
        assert_agrees_with_reference(server, tmp_path / "model")
