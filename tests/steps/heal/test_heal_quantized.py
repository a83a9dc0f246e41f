"""Healing a quantized model with a smaller cache trains what is not packed, and copies the rest."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.quantized import write_quantized
from tests.steps.compress.test_compress import SMALL, write_plan
from tests.steps.heal.models import FAST
from tests.support.dense_models import config, write
from tests.support.stored_models import stored_tensors
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import KeyLayout, ValueLayout
from vllm_gac.planning.request import PlanRequest
from vllm_gac.serving.loading.quantized_checkpoint import check_packed
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.evaluate.compare import compare
from vllm_gac.steps.heal.heal import heal
from vllm_gac.steps.heal.request import HealRequest

HEADS = PlanRequest(kv_ratio=0.6, methods=("heads",))
FORMATS = {
    "W4A16": partial(write_quantized, scheme="W4A16", group_size=16),
    "FP8_DYNAMIC": partial(write_quantized, scheme="FP8_DYNAMIC"),
}


def compressed(scheme: str, directory: Path, text: Path) -> tuple[Path, Path]:
    """A quantized model, and the same with less cache in its second layer."""
    write(directory / "dense", config(attention_bias=True), torch.bfloat16)
    packed, small = directory / "packed", directory / "small"
    FORMATS[scheme](directory / "dense", packed, directory / "rounded")
    dense = open_checkpoint(packed).layout
    first, second = dense.layers
    changed = replace(second, key=KeyLayout("latent", 2, 6), value=ValueLayout(2, 4))
    plan = write_plan(directory / "plan.json", packed, replace(dense, layers=(first, changed)))
    compress(packed, small, plan, calibration=[text], **SMALL)
    return packed, small


@pytest.mark.parametrize(("scheme", "train"), [("W4A16", "full"), ("FP8_DYNAMIC", "lora")])
def test_what_is_packed_stays(scheme: str, train: Any, text: Path, tmp_path: Path) -> None:
    packed, small = compressed(scheme, tmp_path, text)
    out, held_out = tmp_path / "out", tmp_path / "held-out"
    held_out.write_text(text.read_text()[1500::-1])
    # All tokens of sequences this short count, as they do for `compare`.
    request = HealRequest(**FAST | {"sequence_length": 15, "train": train})
    done = heal(small, packed, [text], out, request, held_out=[held_out], progress=False)
    assert done.after.divergence < 0.95 * done.before.divergence
    assert list(all_faults(open_checkpoint(out))) == []
    before, after = stored_tensors(small), stored_tensors(out)
    assert before.keys() == after.keys()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert all(tensor.dtype == after[name].dtype for name, tensor in before.items())
    attention = {name for name in before if name.startswith("model.layers.1.self_attn.")}
    assert before.keys() - same == attention
    old, new = (json.loads((model / "config.json").read_text()) for model in (small, out))
    assert new["quantization_config"] == old["quantization_config"]
    check_packed(out, open_checkpoint(out).layout, new["quantization_config"])
    found = compare(out, packed, [held_out], sequence_length=15)
    assert found.divergence == pytest.approx(done.after.divergence, rel=1e-4)


def test_an_unknown_format_and_packed_attention_are_refused(text: Path, tmp_path: Path) -> None:
    packed, small = compressed("FP8_DYNAMIC", tmp_path, text)
    request, out = HealRequest(**FAST), tmp_path / "out"
    raw = json.loads((small / "config.json").read_text())
    raw["quantization_config"]["quant_method"] = "modelopt"
    (small / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="ModelOpt"):
        heal(small, packed, [text], out, request, progress=False)
    compress(tmp_path / "dense", tmp_path / "16", HEADS, calibration=[text], **SMALL)
    FORMATS["FP8_DYNAMIC"](tmp_path / "16", tmp_path / "8", tmp_path / "of 8")
    with pytest.raises(CheckpointError, match=f"^{tmp_path / '8'}: .*compressed-tensors"):
        heal(tmp_path / "8", tmp_path / "dense", [text], out, request, progress=False)
    assert not out.exists()
