"""What is trained, and what is stored of it."""

import torch

from tests.alignment.random_models import gac_config
from tests.support.dense_models import random_weights
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.student import Student, may_change
from vllm_gac.layout.dims import layout_of

LAYER = {
    "key": {"form": "latent", "heads": 1, "size": 11},
    "value": {"heads": 1, "size": 24},
    "intermediate_size": 32,
    "ranks": {"self_attn.q_proj": 10},
}
ROTARY = LAYER | {"key": {"form": "rotary", "heads": 2, "size": 12}, "rope_table": True}
LAYOUT = layout_of(gac_config([LAYER, ROTARY], 16, attention_bias=True))


def student(rank: int | None, dtype: torch.dtype = torch.bfloat16) -> tuple[Student, dict]:
    weights = {
        name: tensor if name.endswith("rope_inv_freq") else tensor.to(dtype)
        for name, tensor in random_weights(LAYOUT.tensors().items()).items()
    }
    processes = Processes(torch.device("cpu"))
    return Student(LAYOUT, weights.__getitem__, processes, rank, 0.01, may_change), weights


def test_before_training_every_tensor_is_what_was_read() -> None:
    for rank in (None, 4):
        made, weights = student(rank)
        for name, tensor in weights.items():
            assert made.tensor(name).dtype == tensor.dtype, name
            assert torch.equal(made.tensor(name), tensor), name


def test_embeddings_and_rope_tables_stay() -> None:
    made, weights = student(None)
    fixed = {name for name in weights if name not in made.parameters()}
    assert fixed == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.rope_inv_freq",
    }


def test_adapters_change_matrices_by_a_low_rank_and_factors_stay_factors() -> None:
    made, weights = student(2, torch.float32)
    assert "model.layers.0.self_attn.q_proj.A.weight.adapter_a" in made.parameters()
    assert "model.layers.0.self_attn.q_proj.B.bias" in made.parameters()  # trained whole
    for name, parameter in made.parameters().items():
        if name.endswith("adapter_b"):
            torch.nn.init.normal_(parameter)
    for name in ("mlp.up_proj.weight", "self_attn.q_proj.B.weight"):
        change = made.tensor(f"model.layers.0.{name}") - weights[f"model.layers.0.{name}"]
        assert torch.linalg.matrix_rank(change.detach(), rtol=1e-4) == 2, name
    latent = "model.layers.0.self_attn.k_up_proj.weight"
    change = (made.tensor(latent) - weights[latent]).detach()
    assert change.shape == (1, 32, 11)
    assert torch.linalg.matrix_rank(change, rtol=1e-4).tolist() == [2]


def test_small_steps_add_up_although_the_stored_dtype_is_coarse() -> None:
    made, weights = student(None)
    name = "model.layers.0.mlp.up_proj.weight"
    for _ in range(200):
        made.parameters()[name] += 1e-5
    moved = (made.tensor(name).float() - weights[name].float()).mean() * made._scales[name]
    assert abs(moved.item() - 2e-3) < 2e-4


def test_a_copy_is_restored_exactly_and_is_no_view() -> None:
    made, _ = student(3)
    kept = made.copy()
    for parameter in made.parameters().values():
        parameter += 1
    assert all(not torch.equal(kept[name], p) for name, p in made.parameters().items())
    made.restore(kept)
    assert all(torch.equal(kept[name], p) for name, p in made.parameters().items())
