"""Several ranks give the answers of one process: TP, PP, both at once under Ray, and DP."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serving.agreement import PROMPTS
from tests.serving.engines import CPU_RANKS, Answers, assert_same, served_by_ranks
from tests.serving.models import SMOLLM, layer, write_model
from tests.serving.server import serve
from tests.support.dense_models import config, write
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.tensor_parallel import repeated_heads

# With two ranks, the first four layers split all their heads and the others repeat some. Misaligned
# dims are padded, MLP widths for each rank's part.
SHAPES = [
    (("rotary", 4, 64), (4, 64), 512, {"mlp.gate_proj": 64, "mlp.up_proj": 80}),
    (("rotary", 4, 48), (4, 32), 399, {"mlp.gate_proj": 64, "self_attn.o_proj": 80}),
    (("rotary", 4, 64), (2, 64), 448, {"self_attn.k_proj": 48, "mlp.down_proj": 61}),
    (("latent", 4, 32), (2, 48), 256, {"mlp.down_proj": 64, "self_attn.q_proj": 96}),
    (("rotary", 2, 64), (1, 64), 320, {"self_attn.q_proj": 96, "self_attn.v_proj": 40}),
    (("rotary", 1, 32), (1, 40), 512, {"self_attn.k_proj": 24, "mlp.up_proj": 37}),
    (("latent", 1, 96), (1, 64), 250, {"self_attn.k_proj": 40}),
]
# Each shape with dense linears, and with some low-rank ones.
LAYERS = [layer(key, value, width, r) for key, value, width, low in SHAPES for r in ({}, low)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first of two pipeline stages caches more than the second."""
    directory = tmp_path_factory.mktemp("parallel") / "model"
    smollm = SMOLLM | {"no_rope_layers": [1, 0] * len(SHAPES)}
    write_model(directory, LAYERS, attention_bias=True, **smollm)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    return served_by_ranks(model)[0]


def test_tensor_parallel_matches_one_process(model: Path, alone: Answers) -> None:
    answers, room = served_by_ranks(model, tensor_parallel_size=2)
    assert_same(answers, alone)
    layout = repeated_heads(padded_layout(open_checkpoint(model).layout, "minimal", tp=2), 2)
    assert room == pytest.approx(2 * _room(layout), rel=0.01)


def test_pipeline_parallel_matches_one_process(model: Path, alone: Answers) -> None:
    answers, room = served_by_ranks(model, pipeline_parallel_size=2)
    assert_same(answers, alone)
    layout = padded_layout(open_checkpoint(model).layout, "minimal")
    stages = [layout.layers[:5], layout.layers[5:]]  # of as many bytes; vLLM takes 7 and 7
    rooms = [_room(replace(layout, layers=layers)) for layers in stages]
    assert rooms[0] != rooms[1]
    assert room == pytest.approx(min(rooms), rel=0.01)


def test_parallel_moe_matches_one_process(tmp_path: Path) -> None:
    layers = [layer(("rotary", 2, 48), (2, 40), 32), layer(("latent", 2, 48), (2, 64), 32)]
    gac = {"version": 1, "softmax_scale": 0.125, "head_dim": 64, "layers": layers}
    raw = config(
        model_type="qwen3_moe",
        architectures=["GacLlamaForCausalLM"],
        head_dim=64,
        hidden_size=128,
        vocab_size=4096,
        max_position_embeddings=512,
        gac=gac,
    )
    model = write(tmp_path / "model", raw)
    alone, _ = served_by_ranks(model)
    for parallel in ("tensor_parallel_size", "pipeline_parallel_size"):
        answers, _ = served_by_ranks(model, **{parallel: 2})
        assert_same(answers, alone)


@pytest.mark.needs("ray")
def test_ray_executor_matches_one_process(model: Path, alone: Answers) -> None:
    both = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    answers, _ = served_by_ranks(model, **both, distributed_executor_backend="ray")
    assert_same(answers, alone)


def test_data_parallel_matches_one_process(model: Path, alone: Answers, tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--dtype", "float32", "--max-num-batched-tokens", "96")
    with serve(model, tmp_path / "log", *flags, env=CPU_RANKS) as server:
        for _ in range(2):
            answers = server.completions(PROMPTS, len(alone[0][0]))
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in alone]
        done = re.findall(r'vllm:request_success_total{engine="(\d)",.*} (\S+)', server.metrics())
    assert {engine for engine, count in done if float(count) > 0} == {"0", "1"}


def _room(layout: ModelLayout) -> float:
    """Tokens that fit in 1 GiB in fp32."""
    return 2**30 / (4 * layout.kv_elements)
