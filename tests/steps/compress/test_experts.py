"""Of a mixture of experts, heads alone are compressed: exactly, and all else is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import error
from tests.support.dense_models import config, write
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.tensor_parallel import check_split
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

RAW = config(model_type="qwen3_moe", head_dim=32)
FEW = CompressRequest(max_tokens=1024, sequence_length=128)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("experts") / "dense", RAW)


def compressed(dense: Path, text: Path, out: Path, **asked: Any) -> Path:
    request = PlanRequest(methods=("heads",), **asked)
    compress(dense, out, request, FEW, calibration=[text], progress=False)
    return out


def test_experts_stay_as_they_are(dense: Path, text: Path, tmp_path: Path) -> None:
    """What the heads become is in tests/compression/test_densified.py."""
    small = open_checkpoint(compressed(dense, text, tmp_path / "out", kv_ratio=0.35))
    assert list(all_faults(small)) == []
    assert small.layout.kv_elements <= 0.35 * open_checkpoint(dense).layout.kv_elements
    assert "channel of an MLP" not in (tmp_path / "out" / "README.md").read_text()
    experts = [name for name in small.tensors if ".mlp." in name]
    assert len(experts) == 2 * (1 + 3 * RAW["num_experts"])
    with small.reader() as read, open_checkpoint(dense).reader() as before:
        assert all(torch.equal(read(name), before(name)) for name in experts)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--method heads"),
        (("--method", "heads,lowrank"), "experts"),
        (("--method", "heads", "--gpu", "h200"), "experts"),
        (("--method", "heads", "--max-loss", "2%"), "experts"),
        (("--method", "heads", "--param-ratio", ".5"), "--param-ratio 0.5"),
    ],
)
def test_no_plan_touches_experts(
    arguments: tuple[str, ...], named: str, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in error(capsys, "plan", dense, "--kv-ratio", ".6", *arguments)


def test_verbs_that_do_not_support_experts_refuse_them(
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
    block = {"attention": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 32}}
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
