"""`vllm-gac repair` writes a complete directory or none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.alignment.random_models import DEFAULT_ROPE, MISALIGNED, TOKENS, gac_config
from tests.importers.low_rank_models import SOME, write_low_rank
from tests.support import dense_models
from tests.support.command import result
from tests.support.stored_models import change_tensors, logits_of
from vllm_gac.alignment.rules import QuantizationMultiples, padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.steps.repair.repair import repair
from vllm_gac.steps.repair.request import RepairRequest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", gac_config(MISALIGNED, 18, rope_parameters=DEFAULT_ROPE))


def write(directory: Path, raw: dict[str, Any]) -> Path:
    raw = raw | {"head_dim": layout_of(raw).cache_head_dim}
    dense_models.write(directory, raw, tensors=dense_models.weights(raw, gain=1), tokenizer=False)
    (directory / "README.md").write_text("dims that are no longer true")
    return directory


def exact_logits(model: Path) -> torch.Tensor:
    assert list(all_faults(open_checkpoint(model))) == []
    return logits_of(model, TOKENS, torch.float64)


@pytest.mark.parametrize(
    ("strategy", "quantization", "multiple"),
    [
        ("none", None, 1),
        ("minimal", None, 1),
        ("measured", None, 1),
        ("minimal", "mxfp8", 32),
    ],
)
def test_a_repaired_directory_computes_the_same(
    strategy: Any, quantization: Any, multiple: int, model: Path, tmp_path: Path
) -> None:
    out, request = tmp_path / "out", RepairRequest(strategy=strategy, quantization=quantization)
    done = repair(model, out, request, progress=False)
    written, quantized = open_checkpoint(out), QuantizationMultiples(multiple)
    assert written.layout == done.after
    assert done.after == padded_layout(done.before, strategy, quantized=quantized)
    assert written.raw_config["head_dim"] == done.after.cache_head_dim
    assert written.raw_config["gac"]["source"]["repair"]["strategy"] == strategy
    torch.testing.assert_close(exact_logits(out), exact_logits(model), rtol=1e-12, atol=1e-12)
    assert (out / "generation_config.json").read_text() == '{"max_new_tokens": 7}'
    assert "no longer true" not in (out / "README.md").read_text()
    assert not (tmp_path / "out.partial").exists()


def test_the_command_reports_what_it_did(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = result(capsys, "repair", model, "--out", tmp_path / "out", "--gpu", "h200", "--quiet")
    before, after = (open_checkpoint(d).layout for d in (model, tmp_path / "out"))
    assert said["strategy"] == "minimal"
    assert said["parameters"]["before"] == before.parameters
    assert said["parameters"]["after"] == after.parameters
    assert said["kv_bytes_per_token"]["before"] == 2 * before.kv_elements
    assert said["kv_bytes_per_token"]["after"] == 2 * after.kv_elements
    assert said["microseconds"]["before"] > 0
    assert {(c["role"], c["before"], c["after"]) for c in said["changes"]} >= {
        ("head", 18, 24),
        ("width", 21, 24),
        ("rank", 9, 16),
    }
    assert result(capsys, "inspect", "--verify", tmp_path / "out")["ok"]
    assert result(capsys, "inspect", tmp_path / "out")["aligned_fraction"] == 1.0


def test_dense_and_pruned_models_can_be_repaired(tmp_path: Path) -> None:
    dense = dense_models.write(
        tmp_path / "dense", dense_models.config(intermediate_size=91), tokenizer=False
    )
    repair(dense, tmp_path / "out", RepairRequest(strategy="measured"), progress=False)
    assert open_checkpoint(tmp_path / "out").layout.layers[0].intermediate_size == 96
    torch.testing.assert_close(
        exact_logits(tmp_path / "out"), exact_logits(dense), rtol=1e-12, atol=1e-12
    )

    def prune(weights: dict[str, torch.Tensor]) -> None:
        for name, keep in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            full = f"model.layers.1.mlp.{name}.weight"
            weights[full] = weights[full].narrow(keep, 0, 50)

    change_tensors(dense / "model.safetensors", prune)
    done = repair(dense, tmp_path / "pruned", progress=False)
    assert [layer.intermediate_size for layer in done.before.layers] == [91, 50]
    assert [layer.intermediate_size for layer in done.after.layers] == [96, 56]
    exact_logits(tmp_path / "pruned")


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    def narrow(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"].half()

    write_low_rank(tmp_path / "mixed", "svd-llm", SOME, narrow)
    with pytest.raises(CheckpointError, match=r"F16 and F32.*vllm-gac import"):
        repair(tmp_path / "mixed", tmp_path / "out", progress=False)
    assert not (tmp_path / "out.partial").exists()


def test_nan_is_refused(model: Path, tmp_path: Path) -> None:
    change_tensors(model / "model.safetensors", lambda t: t["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        repair(model, tmp_path / "out", progress=False)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
