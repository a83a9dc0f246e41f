"""Of a mixture of experts, heads alone are compressed: exactly, and all else is refused."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.command import error
from tests.support.dense_models import config, in_transformers, write, write_text
from vllm_gac.checkpoint.open import Checkpoint, faults, open_checkpoint
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.tensor_parallel import check_split
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

SIZE, HEADS, KV_HEADS = 32, 4, 2
RAW = config(model_type="qwen3_moe", head_dim=SIZE)
TOKENS = torch.arange(2 * 90).view(2, 90) * 37 % 128
Read = Callable[[str], torch.Tensor]
FEW = CompressRequest(max_tokens=1024, sequence_length=128)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("experts") / "dense", RAW)


@pytest.fixture(scope="module")
def text(dense: Path) -> Path:
    return write_text(dense.with_name("text.txt"))


def compressed(dense: Path, text: Path, out: Path, **asked: Any) -> Path:
    request = PlanRequest(methods=("heads",), **asked)
    compress(dense, out, request, FEW, calibration=[text], progress=False)
    return out


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_ratio": 0.6, "value_group": 1, "key_form": "rotary"},
        {"kv_ratio": 0.4, "value_group": 2, "key_form": "rotary"},
        {"kv_ratio": 0.35, "align": "none", "key_form": "rotary"},
    ],
    ids=str,
)
def test_rotary_keys_are_transformers_model(
    asked: dict[str, Any], dense: Path, text: Path, tmp_path: Path
) -> None:
    """Latents are in tests/compression/test_densified.py; here each head has a norm of its own."""
    small = open_checkpoint(compressed(dense, text, tmp_path / "out", **asked))
    whole = open_checkpoint(dense).layout
    assert list(faults(small, finite=True)) == []
    assert "channel of an MLP" not in (tmp_path / "out" / "README.md").read_text()
    assert small.layout.kv_elements <= asked["kv_ratio"] * whole.kv_elements
    assert any(layer.key.size < SIZE for layer in small.layout.layers)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.AutoConfig.for_model(**RAW)).eval()
    with torch.inference_mode(), small.reader() as read, open_checkpoint(dense).reader() as before:
        theirs.load_state_dict(in_transformers(_densified(small, read)))
        for index, layer in enumerate(theirs.model.layers):
            for name in ("q_norm", "k_norm"):
                weight = _norm(small, read, index, name)
                getattr(layer.self_attn, name).weight = torch.nn.Parameter(weight)
        got, expected = logits(reference(small), read, TOKENS), theirs(TOKENS).logits
        experts = [name for name in small.tensors if ".mlp." in name]
        assert len(experts) == 2 * (1 + 3 * RAW["num_experts"])
        assert all(torch.equal(read(name), before(name)) for name in experts)
    assert got.std() > 0.1
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)


def _densified(model: Checkpoint, read: Read) -> dict[str, torch.Tensor]:
    """The weights of a dense model that computes the same, but for its norms of heads."""
    dense = {}
    for name in open_checkpoint(model.directory).layout.tensors():
        parts = name.split(".")
        part = parts[4] if "self_attn" in parts else ""
        layer = model.layout.layers[int(parts[2])] if part else None
        if part.endswith("_norm") or part == "rope_inv_freq":
            continue
        tensor = read(name)
        if layer is not None and part in ("q_proj", "k_proj"):
            heads = HEADS if part == "q_proj" else KV_HEADS
            places = _places(model, read, int(parts[2])).repeat_interleave(heads // KV_HEADS, 0)
            rows = tensor.view(heads, SIZE, -1)
            tensor = torch.stack([_at(own, place) for own, place in zip(rows, places, strict=True)])
            tensor = tensor.flatten(0, 1)
        elif layer is not None and part == "v_proj":
            values = tensor.view(layer.value.heads, layer.value.size, -1)
            values = _filled(values, 1, SIZE)
            tensor = values.repeat_interleave(KV_HEADS // layer.value.heads, 0).flatten(0, 1)
        elif layer is not None and part == "o_proj":
            each = tensor.view(-1, HEADS, layer.value.size)
            tensor = _filled(each, 2, SIZE).flatten(1)
        dense[name] = tensor
    for index, norm in product(range(len(model.layout.layers)), ("q_norm", "k_norm")):
        # The test sets those of each head.
        dense[f"model.layers.{index}.self_attn.{norm}.weight"] = torch.ones(SIZE)
    return dense


def _norm(model: Checkpoint, read: Read, index: int, name: str) -> torch.Tensor:
    """The weights of q_norm or k_norm [heads, SIZE]: 0 where a head has lost a pair."""
    heads = HEADS if name == "q_norm" else KV_HEADS
    stored = read(f"model.layers.{index}.self_attn.{name}.weight")
    if stored.ndim == 1:
        return stored.expand(heads, -1)
    places = _places(model, read, index)
    # Pairs that are gone come last in each half.
    halves = _filled(stored.view(KV_HEADS, 2, -1), 2, SIZE // 2).flatten(1)
    whole = torch.stack([_at(own, place) for own, place in zip(halves, places, strict=True)])
    return whole.repeat_interleave(heads // KV_HEADS, 0)


def _places(model: Checkpoint, read: Read, index: int) -> torch.Tensor:
    """For each key head and each of its rows, which row it is in a dense head, by frequencies."""
    whole = torch.arange(SIZE // 2)
    own = 10000.0 ** (-2 * whole / SIZE)
    if not model.layout.layers[index].key.rope_table:
        return torch.cat((whole, whole + SIZE // 2)).expand(KV_HEADS, -1)
    places = []
    for table in read(f"model.layers.{index}.self_attn.rope_inv_freq").expand(KV_HEADS, -1):
        kept = [int((own - frequency).abs().argmin()) for frequency in table if frequency > 0]
        assert torch.allclose(own[kept], table[: len(kept)], rtol=1e-6)
        pairs = torch.tensor([*kept, *(pair for pair in whole.tolist() if pair not in kept)])
        places.append(torch.cat((pairs, pairs + SIZE // 2)))
    return torch.stack(places)


def _at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    moved = torch.empty_like(rows)
    moved[places] = rows
    return moved


def _filled(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "has experts, which stay as they are, beside attention; give --method heads"),
        (("--method", "heads,lowrank"), "has experts, which stay as they are"),
        (("--method", "heads", "--gpu", "h200"), "profiles have no times of experts"),
        (("--method", "heads", "--max-loss", "2%"), "profiles have no times of experts"),
        (("--method", "heads", "--param-ratio", ".5"), "--param-ratio 0.5: not feasible"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_no_plan_touches_experts(
    arguments: tuple[str, ...], message: str, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error(capsys, "plan", dense, "--kv-ratio", ".6", *arguments)


def test_what_other_verbs_do_not_do_is_one_sentence(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, out = compressed(dense, text, tmp_path / "small", kv_ratio=0.6), tmp_path / "out"
    said = error(capsys, "calibrate", dense, "--text", text, "--out", out)
    assert "give --method heads" in said
    said = error(capsys, "heal", small, "--teacher", dense, "--text", text, "--out", out)
    assert f"{small}: healing holds a layer's weights and their gradients" in said
    said = error(capsys, "export", small, "--out", out)
    assert "of a Qwen3-MoE nothing else is compressed; serve it as it is" in said
    assert not out.exists()


def test_a_model_of_another_tool_is_refused(tmp_path: Path) -> None:
    block = {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 32}}
    raw = RAW | {"block_configs": [block] * 2}
    with pytest.raises(CheckpointError, match="a Qwen3-MoE that another tool compressed"):
        open_any_format(write(tmp_path / "model", raw))


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model", RAW)
    write(tmp_path / "narrow", RAW | {"moe_intermediate_size": 24})
    config_of = tmp_path / "model" / "config.json"
    (tmp_path / "narrow" / "config.json").write_bytes(config_of.read_bytes())
    form, model = open_any_format(tmp_path / "narrow")
    assert form == "dense"
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert f"{name}: shape [24, 48], expected [32, 48]" in next(faults(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, "mlp_only_layers, decoder_sparse_step: say that some layers"),
        ({"decoder_sparse_step": 2}, "mlp_only_layers, decoder_sparse_step: say that some layers"),
        ({"use_sliding_window": True}, "use_sliding_window: is true; mixtures of experts whose"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: models with"),
        ({"num_local_experts": 4}, "num_experts: is 8, num_local_experts 4; let them agree"),
        ({"num_experts": None}, "experts.num_experts: "),
        ({"num_experts_per_tok": 9}, "experts: num_experts_per_tok: is 9, and there are 8"),
        ({"moe_intermediate_size": 0}, "experts.moe_intermediate_size: "),
        ({"attention_bias": True}, "attention_bias: is true"),
    ],
    ids=str,
)
def test_configs_that_are_not_served_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        layout_of(RAW | changes)


def test_both_names_of_the_number_of_experts_are_read() -> None:
    theirs = {key: value for key, value in RAW.items() if key != "num_experts"}
    assert layout_of(theirs | {"num_local_experts": 8}) == layout_of(RAW)


@pytest.mark.parametrize(
    "changed", [{"intermediate_size": 16}, {"ranks": {"mlp.up_proj": 8}}], ids=str
)
def test_a_gac_object_with_other_experts_is_refused(changed: dict[str, Any]) -> None:
    layout = layout_of(RAW)
    section = layout.section()
    section["layers"][1] |= changed
    raw = RAW | {"architectures": ["GacLlamaForCausalLM"], "gac": section}
    with pytest.raises(CheckpointError, match=r"gac\.layers\.1: the experts of a Qwen3-MoE stay"):
        layout_of(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": 33}, "has moe_intermediate_size = 33, which 2 GPUs"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, "has num_experts = 1, which 2 GPUs"),
    ],
    ids=str,
)
def test_experts_that_gpus_cannot_share_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_split(layout_of(RAW | changes), 2)
