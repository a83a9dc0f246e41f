"""Compression of whole directories: results, refusals and interruptions."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support.dense_models import LINEAR_ROPE, LLAMA3_ROPE, config, write
from tests.support.hub import files_of
from tests.support.stored_models import logits_of
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.layout.dims import KeyLayout, ModelLayout, ValueLayout
from vllm_gac.planning.plan_file import dense_plan
from vllm_gac.planning.planner import plan as plan_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.steps.compress import compress as module
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest
from vllm_gac.steps.evaluate.perplexity import window_losses
from vllm_gac.steps.inspect import inspect

# Letters, as in the calibration text.
TOKENS = 64 + torch.arange(80).view(1, 80) ** 2 % 26
RATIOS: dict[str, Any] = {"plan": PlanRequest(param_ratio=0.8, kv_ratio=0.75)}
SMALL: dict[str, Any] = {
    "request": CompressRequest(max_tokens=1024, sequence_length=128),
    "progress": False,
}
FEW = CalibrateRequest(max_tokens=512, sequence_length=128)

MODELS = {
    "gqa": (config(), {}),
    "mha, tied": (config(num_key_value_heads=4, tie_word_embeddings=True), {}),
    "llama3 rope, shards": (config(rope_parameters=LLAMA3_ROPE), {"shards": 3}),
    "linear rope": (config(rope_parameters=LINEAR_ROPE), {}),
    "mistral, bf16": (
        config(model_type="mistral", sliding_window=24, dtype="bfloat16"),
        {"dtype": torch.bfloat16},
    ),
    "biased everywhere": (config(attention_bias=True, mlp_bias=True), {}),
    "ministral3": (config(model_type="ministral3"), {}),
    "seed_oss": (config(model_type="seed_oss"), {}),
    "smollm3": (config(model_type="smollm3"), {}),
    "qwen2, tied": (config(model_type="qwen2", tie_word_embeddings=True), {}),
    "qwen3, bf16": (
        config(model_type="qwen3", head_dim=32, dtype="bfloat16"),
        {"dtype": torch.bfloat16},
    ),
    "phi3, bf16, shards": (
        config(model_type="phi3", dtype="bfloat16"),
        {"dtype": torch.bfloat16, "shards": 3},
    ),
    "qwen3_moe, bf16": (
        config(model_type="qwen3_moe", dtype="bfloat16"),
        {"dtype": torch.bfloat16},
    ),
    "three KV heads": (config(num_attention_heads=6, num_key_value_heads=3), {}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dense") / "model", config())


def write_plan(path: Path, model: Path, layout: ModelLayout) -> Path:
    """Write plan.json for `layout` as a planner with large budgets would."""
    methods = ("heads", "prune", "lowrank")
    plan = dense_plan(open_checkpoint(model), methods)
    changes: dict[str, Any] = {
        "parameters": plan.parameters.model_dump() | {"used": layout.parameters},
        "kv_elements": plan.kv_elements.model_dump() | {"used": layout.kv_elements},
    }
    changes["layers"] = [layer.section() for layer in layout.layers]
    path.write_text(json.dumps(plan.model_dump(mode="json") | changes))
    return path


# Of a mixture of experts only heads are compressed: tests/steps/compress/test_experts.py. Where low
# rank meets what a layer is made of, it is tried, too.
LOW_RANK = ("gqa", "biased everywhere", "qwen3, bf16", "phi3, bf16, shards")


@pytest.mark.parametrize(
    ("name", "methods"),
    [(name, ("heads", "prune")) for name in MODELS if "moe" not in name]
    + [(name, ("heads", "lowrank")) for name in LOW_RANK],
)
def test_budgets_hold_and_the_result_can_be_served(
    name: str, methods: tuple[str, ...], text: Path, tmp_path: Path
) -> None:
    raw, options = MODELS[name]
    model, out = write(tmp_path / "model", raw, **options), tmp_path / "out"
    asked = PlanRequest(param_ratio=0.8, kv_ratio=0.75, methods=methods)
    layout = compress(model, out, asked, calibration=[text], **SMALL).layout
    dense, small = open_checkpoint(model), open_checkpoint(out)
    assert small.layout == layout
    assert layout.parameters <= 0.8 * dense.layout.parameters
    assert layout.kv_elements <= 0.75 * dense.layout.kv_elements
    assert list(all_faults(small)) == []
    assert {i.dtype for n, i in small.tensors.items() if not n.endswith("rope_inv_freq")} == {
        i.dtype for i in dense.tensors.values()
    }
    assert small.raw_config["architectures"] == ["GacLlamaForCausalLM"]
    assert small.raw_config["head_dim"] == layout.cache_head_dim
    assert small.raw_config["model_type"] == raw["model_type"]
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()
    assert bool(logits_of(out, TOKENS).isfinite().all())


@pytest.mark.parametrize("name", MODELS)
def test_at_ratio_one_the_logits_are_the_dense_models(name: str, tmp_path: Path) -> None:
    raw, options = MODELS[name]
    model = write(tmp_path / "model", raw, **options)
    compress(model, tmp_path / "out", progress=False)  # and it needs no calibration
    assert torch.equal(logits_of(tmp_path / "out", TOKENS), logits_of(model, TOKENS))


def test_a_plan_applied_again_gives_the_same_bytes(model: Path, text: Path, tmp_path: Path) -> None:
    compress(model, tmp_path / "one", calibration=[text], **RATIOS, **SMALL)
    plan = tmp_path / "one" / "plan.json"
    compress(model, tmp_path / "two", plan=plan, calibration=[text], **SMALL)
    many = replace(FEW, max_tokens=1024)
    calibrate(model, [text], tmp_path / "s", many, progress=False)
    compress(model, tmp_path / "three", plan=plan, stats=tmp_path / "s", progress=False)
    one, two, three = (files_of(tmp_path / name) for name in ("one", "two", "three"))
    for files in (one, two, three):
        del files["digests.json"]  # says which run it was
    assert one == two
    # Statistics do not say which text they are of, so the card of `three` names none.
    assert "a text file" in one.pop("README.md").decode()
    assert "a text file" not in three.pop("README.md").decode()
    assert one == three


@pytest.mark.parametrize("sequences", [7, 8])
def test_too_few_sequences_to_refit_on_are_told(
    model: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, sequences: int
) -> None:
    stats, few = tmp_path / "stats", replace(FEW, max_tokens=128 * sequences, sequence_length=128)
    calibrate(model, [text], stats, few, progress=False)
    compress(model, tmp_path / "out", stats=stats, progress=False, **RATIOS)
    source = open_checkpoint(tmp_path / "out").raw_config["gac"]["source"]
    assert source["refitted"] == (sequences == 8)
    assert ("refit" in caplog.text) == (sequences == 7)


def test_tokens_of_given_statistics_cannot_be_asked_for(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--max-tokens.*--stats"):
        compress(model, tmp_path / "out", stats=tmp_path / "stats", **RATIOS, **SMALL)


def test_the_model_is_measured_on_held_out_tokens(
    model: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibrate(model, [text], tmp_path / "stats", FEW, progress=False)
    done = compress(model, tmp_path / "out", stats=tmp_path / "stats", progress=False, **RATIOS)
    assert done.measured is not None
    held = load_file(tmp_path / "stats")["held"].long()
    assert done.measured.tokens == held[:, 1:].numel()
    dense, small = (
        sum(window_losses(open_checkpoint(of), [held], "cpu", False))
        for of in (model, tmp_path / "out")
    )
    ratio = math.exp((small - dense) / done.measured.tokens)
    assert done.measured.ratio == pytest.approx(ratio, abs=1e-4)
    assert done.measured.divergence > 0
    assert ("tasks" in caplog.text.lower()) == (done.measured.divergence > 0.015)
    assert inspect(tmp_path / "out").measured == done.measured
    assert str(done.measured) in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("form", ["rotary", "latent"])
def test_normed_keys_are_made_smaller_one_by_one(form: str, text: Path, tmp_path: Path) -> None:
    model = write(tmp_path / "model", config(model_type="qwen3"))
    asked = PlanRequest(kv_ratio=0.6, methods=("heads",), key_form=form)
    layout = compress(model, tmp_path / "out", asked, calibration=[text], **SMALL).layout
    dense = open_checkpoint(model).layout
    for layer in layout.layers:
        assert (layer.key.form, layer.key.heads) == (form, 2)
        assert layout.projected_sizes(layer) == (16, 16 if form == "rotary" else layer.key.size)
    with pytest.raises(PlanError, match="--key-group 2"):
        compress(
            model, tmp_path / "other", replace(asked, key_group=2), calibration=[text], **SMALL
        )
    for key in (KeyLayout("latent", 1, 16), KeyLayout("rotary", 1, 16, True)):
        changed = replace(dense.layers[0], key=key, value=ValueLayout(1, 16))
        plan = write_plan(tmp_path / "plan.json", model, replace(dense, layers=(changed,) * 2))
        with pytest.raises(PlanError, match=r"key\.heads"):
            compress(model, tmp_path / "other", plan=plan, calibration=[text], **SMALL)


def test_a_plan_in_memory_is_as_good_as_its_file(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config())
    other = write(tmp_path / "other", config(rms_norm_eps=1e-6))
    made = plan_of(model)
    layout = compress(model, tmp_path / "out", made, progress=False).layout
    assert layout == open_checkpoint(model).layout  # nothing was asked to shrink
    with pytest.raises(PlanError, match=r"^plan: "):
        compress(other, tmp_path / "no", made, progress=False)


def test_a_compressed_model_and_what_is_of_another_model_are_refused(
    model: Path, text: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", config(rms_norm_eps=1e-6))
    once, stats = tmp_path / "once", tmp_path / "stats"
    compress(other, once, calibration=[text], **RATIOS, **SMALL)
    calibrate(other, [text], stats, FEW, progress=False)
    for source, given, error, named in (
        (once, RATIOS, CheckpointError, once),
        (model, {"plan": once / "plan.json"}, PlanError, "plan.json"),
        (
            model,
            RATIOS | {"stats": stats, "calibration": (), "request": None},
            CheckpointError,
            stats,
        ),
    ):
        with pytest.raises(error, match=str(named)):
            compress(source, tmp_path / "out", **{"calibration": [text]} | SMALL | given)
        assert not list(tmp_path.glob("out*"))


def test_a_broken_request_in_a_plan_is_named(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    raw = json.loads(demo.PLAN.read_text())
    plan.write_text(json.dumps(raw | {"notes": {"request": {"param_ratio": "x"}}}))
    text = tmp_path / "text.txt"
    text.write_text("words")
    with pytest.raises(PlanError, match=r"notes\.request.*--param-ratio"):
        compress(demo.MODEL, tmp_path / "out", plan, calibration=[text], held_out=[text])
    assert not list(tmp_path.glob("out*"))


def test_a_run_does_not_go_on_with_a_profile_that_has_changed(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "write_statistics", Mock(side_effect=KeyboardInterrupt))
    path = tmp_path / "profile.json"
    asked = PlanRequest(param_ratio=0.8, gpu=str(path))
    for gpu, error in (("1", KeyboardInterrupt), ("1", KeyboardInterrupt), ("2", CheckpointError)):
        write_profile(path, read_profile("h200").model_copy(update={"gpu": gpu}))
        with pytest.raises(error):
            compress(model, tmp_path / "out", asked, calibration=[text], resume=True, **SMALL)
