"""Of a quantized model, keys and values are made smaller, and all else stays as it was packed."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.serving.quantized import scales_of_layers, write_fp8, write_quantized, write_words
from tests.steps.compress.test_compress import SMALL, write_plan
from tests.support.command import error
from tests.support.dense_models import config, write
from tests.support.stored_models import stored_tensors
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.quantized.packing import spread
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import ValueLayout
from vllm_gac.planning.request import PlanRequest
from vllm_gac.serving.loading.quantized_checkpoint import check_packed
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.convert.export import export

HEADS = PlanRequest(kv_ratio=0.6, methods=("heads",))
Write = Callable[[Path, Path, Path], None]
FORMATS: dict[str, Write] = {
    "FP8": partial(write_quantized, scheme="FP8", cache_scales=scales_of_layers(2, "{}_scale")),
    "FP8_DYNAMIC": partial(write_quantized, scheme="FP8_DYNAMIC"),
    "FP8_BLOCK": partial(write_quantized, scheme="FP8_BLOCK", block=[16, 16]),
    "W8A8": partial(write_quantized, scheme="W8A8"),
    "W4A16": partial(write_quantized, scheme="W4A16", group_size=16),
    "W4A16_ASYM": partial(write_quantized, scheme="W4A16_ASYM", group_size=16),
    "W8A16": partial(write_quantized, scheme="W8A16", group_size=16),
    "fp8 in blocks": partial(write_fp8, block=(16, 16)),
    "fp8": write_fp8,
    "gptq": partial(write_words, method="gptq", size=16),
    "awq": partial(write_words, method="awq", size=16),
}
# Where each format lists what is left out.
LISTS = ("ignore", "modules_to_not_convert")
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module", params=FORMATS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized model; beside it is the same with the rounded weights in fp32."""
    return made_by(request.param, tmp_path_factory.mktemp("packed"))


def made_by(scheme: str, directory: Path) -> Path:
    write(directory / "dense", config())
    FORMATS[scheme](*(directory / name for name in ("dense", "packed", "rounded")))
    return directory / "packed"


def values(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(directory)
    with checkpoint.reader() as read:
        return {name: read(name) for name in checkpoint.layout.tensors()}


def section(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found["quantization_config"]


def left_out(directory: Path) -> set[str]:
    """The linear layers that a model says are not quantized, of those that it has."""
    said = section(directory)
    names = {name for key in LISTS for name in said.get(key) or ()}
    rules = [rule.removeprefix("-:") for rule in said.get("dynamic") or ()]
    shapes = open_checkpoint(directory).layout.tensors().items()
    linears = {name.removesuffix(".weight") for name, shape in shapes if len(shape) == 2}
    linears = {name for name in linears if name.endswith("_proj")}
    return names | {name for name in linears for rule in rules if re.match(rule, name)}


def test_packed_weights_are_read_as_the_library_reads_them(packed: Path, tmp_path: Path) -> None:
    assert list(all_faults(open_checkpoint(packed))) == []
    export(packed, tmp_path / "exported", progress=False)
    for read in (values(packed), stored_tensors(tmp_path / "exported")):
        torch.testing.assert_close(read, values(packed.with_name("rounded")))
    assert "quantization_config" not in (tmp_path / "exported" / "config.json").read_text()


def test_blocks_at_the_edge_are_cut() -> None:
    scales = spread(torch.tensor([[1, 2], [3, 4]]), 3, 5, (2, 4))
    assert scales.tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [3, 3, 3, 3, 4]]


def test_all_but_attention_stays_as_it_was_packed(packed: Path, text: Path, tmp_path: Path) -> None:
    for model, out in ((packed, "out"), (packed.with_name("rounded"), "rounded")):
        done = compress(model, tmp_path / out, HEADS, calibration=[text], **SMALL)
    assert done.measured is not None
    small = open_checkpoint(tmp_path / "out")
    assert list(all_faults(small)) == []
    check_packed(tmp_path / "out", small.layout, section(tmp_path / "out"))
    before, after = stored_tensors(packed), stored_tensors(tmp_path / "out")
    linears = {f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"}
    assert left_out(tmp_path / "out") == left_out(packed) | linears
    assert section(tmp_path / "out").get("kv_cache_scheme") is None
    assert "q, k, v and o of 2 layers" in (tmp_path / "out" / "README.md").read_text()
    kept = {name: tensor for name, tensor in before.items() if "self_attn" not in name}
    assert {name for name in after if "self_attn" not in name} == kept.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    # In later layers, the refit makes up for what down_proj could not.
    plain, first = stored_tensors(tmp_path / "rounded"), "model.layers.0.self_attn."
    attention = {name: tensor for name, tensor in after.items() if name.startswith(first)}
    expected = {name: tensor for name, tensor in plain.items() if name.startswith(first)}
    torch.testing.assert_close(attention, expected, rtol=1e-3, atol=1e-4)


def test_a_text_model_beside_a_vision_model_is_packed_as_alone(text: Path, tmp_path: Path) -> None:
    """By the names that Mistral gives tensors and scales of a Ministral 3 in FP8."""
    alone = made_by("fp8", tmp_path)
    raw = json.loads((alone / "config.json").read_text())
    said = raw.pop("quantization_config") | {"modules_to_not_convert": ["language_model.lm_head"]}
    around = {"model_type": "mistral3", "text_config": raw, "quantization_config": said}
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "config.json").write_text(json.dumps(around))
    shutil.copy(alone / "tokenizer.json", tmp_path / "around")
    stored = {
        f"language_model.{name}".replace(".weight_scale", ".weight_scale_inv").replace(
            ".input_scale", ".activation_scale"
        ): tensor
        for name, tensor in stored_tensors(alone).items()
    }
    save_file(stored, tmp_path / "around" / "model.safetensors")
    for name in ("packed", "around"):
        compress(tmp_path / name, tmp_path / f"{name} small", HEADS, calibration=[text], **SMALL)
    assert section(tmp_path / "around small") == section(tmp_path / "packed small")
    one, other = (stored_tensors(tmp_path / f"{name} small") for name in ("packed", "around"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].float(), other[name].float()) for name in one)


def test_a_layer_that_keeps_its_dims_is_copied(packed: Path, text: Path, tmp_path: Path) -> None:
    dense = open_checkpoint(packed).layout
    changed = replace(dense.layers[0], value=ValueLayout(2, 8))
    layout = replace(dense, layers=(dense.layers[0], changed))
    plan = write_plan(tmp_path / "plan.json", packed, layout)
    compress(packed, tmp_path / "out", plan, calibration=[text], **SMALL)
    before, after = stored_tensors(packed), stored_tensors(tmp_path / "out")
    first = [name for name in before if ".0." in name and not name.endswith(("k_scale", "v_scale"))]
    assert {name for name in after if ".0." in name} == {*first}
    assert all(torch.equal(after[name], before[name]) for name in first)
    assert not any(".0." in name for name in left_out(tmp_path / "out"))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a quantized model in a format, once."""
    return cache(lambda name: made_by(name, tmp_path_factory.mktemp("model")))


Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def put(part: str, tensor: torch.Tensor) -> Change:
    return lambda tensors, _: tensors.update({f"{O_PROJ}.{part}": tensor})


def drop(part: str) -> Change:
    return lambda tensors, _: tensors.pop(f"{O_PROJ}.{part}")


def say(**changes: Any) -> Change:
    return lambda _, section: section.update(changes)


def put_weights(**changes: Any) -> Change:
    return lambda _, section: section["config_groups"]["config_group_0"]["weights"].update(changes)


# By case: the format, what is changed, and what the message names.
DAMAGED: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "too few scales": (
        "FP8_DYNAMIC",
        put("weight_scale", torch.ones(3, 1)),
        (f"{O_PROJ}.weight_scale", "[3, 1]", "[48, 1]"),
    ),
    "another type": (
        "FP8_DYNAMIC",
        put("weight", torch.ones(48, 64, dtype=torch.int8)),
        (f"{O_PROJ}.weight", "I8", "F8_E4M3"),
    ),
    "a stranger": ("FP8_DYNAMIC", put("weight_g_idx", torch.ones(64)), (f"{O_PROJ}.weight_g_idx",)),
    "infinite": (
        "FP8_DYNAMIC",
        put("weight_scale", torch.full((48, 1), torch.inf)),
        (f"{O_PROJ}.weight_scale",),
    ),
    "NVFP4": ("FP8_DYNAMIC", say(format="nvfp4-pack-quantized"), ("nvfp4-pack-quantized",)),
    "rotated": (
        "FP8_DYNAMIC",
        say(transform_config={"config_groups": {"R1": {}}}),
        ("transform_config",),
    ),
    "no groups": ("FP8_DYNAMIC", say(config_groups={}), ("config_groups",)),
    "of another tool": ("FP8_DYNAMIC", say(quant_method="modelopt"), ("ModelOpt",)),
    "ordered groups": ("W4A16_ASYM", put_weights(actorder="group"), ("actorder='group'",)),
    "three bits": ("W4A16_ASYM", put_weights(num_bits=3), ("num_bits=3",)),
    "another FP8": ("fp8 in blocks", say(fmt="e5m2"), ("quantization_config", "fmt")),
    "GPTQ of ordered groups": ("gptq", say(desc_act=True), ("desc_act",)),
    "GPTQ with zero points of its own": ("gptq", say(sym=False), ("sym",)),
    "GPTQ of several types": (
        "gptq",
        say(dynamic={"+:.*up_proj": {"bits": 8}}),
        ("dynamic", "+:.*up_proj"),
    ),
    "AWQ for other kernels": ("awq", say(version="gemv"), ("version",)),
}
# The tensors of a linear layer that a format cannot do without.
PARTS = {
    "FP8": ("weight", "weight_scale"),
    "FP8_DYNAMIC": ("weight", "weight_scale"),
    "FP8_BLOCK": ("weight", "weight_scale"),
    "W8A8": ("weight", "weight_scale"),
    "W4A16_ASYM": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "W8A16": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8": ("weight", "weight_scale"),
    "fp8 in blocks": ("weight", "weight_scale_inv"),
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
}
DAMAGED |= {
    f"{scheme} without {part}": (scheme, drop(part), (f"{O_PROJ}.{part}",))
    for scheme, parts in PARTS.items()
    for part in parts
}


@pytest.mark.parametrize("case", DAMAGED)
def test_invalid_quantized_checkpoints_are_refused(
    case: str, text: Path, tmp_path: Path, model_of: Callable[[str], Path]
) -> None:
    scheme, change, named = DAMAGED[case]
    model = model_of(scheme)
    shutil.copytree(model, tmp_path / "model")
    tensors, raw = stored_tensors(model), json.loads((model / "config.json").read_text())
    for group in raw["quantization_config"].get("config_groups", {}).values():
        group["format"] = None
    change(tensors, raw["quantization_config"])
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as raised:
        compress(tmp_path / "model", tmp_path / "out", HEADS, calibration=[text], **SMALL)
    assert all(name in str(raised.value) for name in named), raised.value


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_families_whose_packed_tensors_are_not_read_are_named(
    family: str, text: Path, tmp_path: Path
) -> None:
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    write(tmp_path / "model", config(model_type=family, quantization_config=section))
    with pytest.raises(CheckpointError, match="one tensor" if family == "phi3" else "experts"):
        compress(tmp_path / "model", tmp_path / "out", HEADS, calibration=[text], **SMALL)


def test_unsupported_compression_of_quantized_models_is_refused(
    model_of: Callable[[str], Path], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8, out = model_of("FP8_DYNAMIC"), tmp_path / "out"
    for arguments in ((), ("--method", "heads,lowrank")):
        said = error(capsys, "compress", fp8, "--kv-ratio", ".6", *arguments, "--out", out)
        assert "--method heads" in said
        assert "export" in said
    said = error(capsys, "plan", fp8, "--kv-ratio", ".6", "--method", "heads", "--gpu", "h200")
    assert "--gpu" in said
    assert "--method heads" in error(capsys, "calibrate", fp8, "--text", text, "--out", out)
    assert str(fp8) in error(capsys, "repair", fp8, "--out", out)
    dense = open_checkpoint(fp8).layout
    narrow = replace(dense, layers=(replace(dense.layers[0], intermediate_size=64),) * 2)
    plan = write_plan(tmp_path / "plan.json", fp8, narrow)
    with pytest.raises(PlanError, match="export"):
        compress(fp8, out, plan, calibration=[text], **SMALL)
    assert not out.exists()
