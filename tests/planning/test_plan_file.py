"""Uniform plans: budgets are never exceeded, dims are allowed ones, the rest is explained."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dense_models import config
from vllm_gac.alignment.rules import align
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig, LayerSection, validate
from vllm_gac.planning.plan_file import Plan, budget_of, planned_layout, read_plan, uniform_plan
from vllm_gac.planning.prior_losses import expected_loss


def model(directory: Path, **changes: Any) -> Checkpoint:
    """A model of which there is only the config."""
    raw = config(**changes)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return Checkpoint(directory, raw, validate(HfConfig, raw, "config"), layout_of(raw), {})


LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
DEMO = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    directory = tmp_path_factory.mktemp("models")
    return {
        "8B": model(directory / "8b", **LLAMA_8B),
        "demo": model(directory / "demo", **DEMO),
        "tiny": model(directory / "tiny"),
        "mha": model(directory / "mha", num_key_value_heads=4),
        "odd": model(directory / "odd", num_attention_heads=6, num_key_value_heads=3, head_dim=24),
    }


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["8B", "demo", "tiny", "mha", "odd"]),
    param_ratio=st.floats(0.3, 1.0),
    kv_ratio=st.floats(0.05, 1.0),
    methods=st.sets(st.sampled_from(["heads", "prune", "lowrank"]), min_size=1),
    strategy=st.sampled_from(["minimal", "optimal", "predefined"]),
    key_form=st.sampled_from(["auto", "rotary", "latent"]),
)
def test_budgets_are_never_exceeded_and_dims_are_allowed(
    models: dict[str, Checkpoint],
    name: str,
    param_ratio: float,
    kv_ratio: float,
    methods: set[str],
    strategy: Any,
    key_form: str,
) -> None:
    dense = models[name].layout
    try:
        plan = uniform_plan(
            models[name],
            param_ratio=param_ratio,
            kv_ratio=kv_ratio,
            methods=sorted(methods),
            align=strategy,
            key_form=key_form,
        )
    except PlanError as e:
        assert "not feasible" in str(e) or name in ("tiny", "mha", "odd")  # noqa: PT017
        return
    layout = planned_layout(models[name], plan)
    assert (
        layout.parameters == plan.parameters.used <= Fraction(str(param_ratio)) * dense.parameters
    )
    assert (
        layout.kv_elements == plan.kv_elements.used <= Fraction(str(kv_ratio)) * dense.kv_elements
    )
    full = {role: {dim for _, r, dim in dense.dims() if r == role} for role in ("head", "width")}
    full["head"] |= {2 * dense.head_dim}
    for where, role, dim in layout.dims():
        assert dim == align(dim, strategy, role) or dim in full.get(role, ()), (where, dim)


@pytest.mark.parametrize("name", ["8B", "demo"])
@pytest.mark.parametrize(
    "ratios", [(0.9, 0.75), (0.85, 0.75), (0.8, 0.5), (0.7, 0.5), (0.6, 0.375)]
)
def test_what_is_allowed_is_nearly_used_up(
    models: dict[str, Checkpoint], name: str, ratios: tuple[float, float]
) -> None:
    plan = uniform_plan(models[name], param_ratio=ratios[0], kv_ratio=ratios[1])
    dense = models[name].layout
    step = 3 * dense.hidden_size * 64  # one step of one layer's MLP
    whole = all(s.intermediate_size == dense.layers[0].intermediate_size for s in plan.layers)
    assert whole or plan.parameters.allowed - plan.parameters.used < step


def test_less_is_expected_to_cost_more(models: dict[str, Checkpoint]) -> None:
    ratios = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65]
    losses = [
        uniform_plan(models["demo"], param_ratio=r, kv_ratio=r).notes["expected_loss"]
        for r in ratios
    ]
    assert losses[0] == 0
    assert losses == sorted(losses)


def test_nothing_to_remove_is_the_dense_layout(models: dict[str, Checkpoint]) -> None:
    for checkpoint in models.values():
        plan = uniform_plan(checkpoint, param_ratio=1.0, kv_ratio=1.0)
        assert planned_layout(checkpoint, plan) == checkpoint.layout


def test_forms_and_groups_are_obeyed(models: dict[str, Checkpoint]) -> None:
    for key_group, value_group in ((1, 1), (1, 2), (2, 2)):
        for form in ("rotary", "latent"):
            plan = uniform_plan(
                models["8B"],
                param_ratio=0.9,
                kv_ratio=0.5,
                key_form=form,
                key_group=key_group,
                value_group=value_group,
            )
            section = plan.layers[0]
            assert section.key.form == form
            assert section.key.heads == 8 // key_group
            assert section.value.heads == 8 // value_group


def test_an_infeasible_ratio_is_answered_with_the_smallest_feasible_one(
    models: dict[str, Checkpoint],
) -> None:
    for flag, name in (("--param-ratio", "param_ratio"), ("--kv-ratio", "kv_ratio")):
        ratios = {"param_ratio": 1.0, "kv_ratio": 1.0, name: 0.001}
        with pytest.raises(PlanError, match=f"{flag} 0.001: not feasible") as caught:
            uniform_plan(models["demo"], **ratios)
        smallest = float(str(caught.value).split("at least ")[1].split()[0])
        uniform_plan(models["demo"], **ratios | {name: smallest})
        with pytest.raises(PlanError, match="not feasible"):
            uniform_plan(models["demo"], **ratios | {name: smallest - 2e-4})


def test_the_cache_cannot_shrink_without_the_heads_method(models: dict[str, Checkpoint]) -> None:
    with pytest.raises(PlanError, match=r"--kv-ratio 0.75: .* --method prune; at least 1.0"):
        uniform_plan(models["demo"], param_ratio=0.9, kv_ratio=0.75, methods=["prune"])


def test_forms_that_three_kv_heads_cannot_have_are_explained(models: dict[str, Checkpoint]) -> None:
    with pytest.raises(PlanError, match="3 KV heads"):
        uniform_plan(models["odd"], param_ratio=0.9, kv_ratio=0.5, key_group=2)
    with pytest.raises(PlanError, match="whole key heads"):
        uniform_plan(models["8B"], param_ratio=0.9, kv_ratio=0.5, key_group=2, value_group=1)


def test_an_8b_model_is_planned_within_seconds_with_64_aligned_widths(
    models: dict[str, Checkpoint],
) -> None:
    plan = uniform_plan(models["8B"], param_ratio=0.8, kv_ratio=0.5)
    widths = {section.intermediate_size for section in plan.layers}
    assert all(width % 64 == 0 for width in widths)
    assert max(widths) - min(widths) <= 64


class TestReading:
    """plan.json, as another hand may have written it."""

    @pytest.fixture(autouse=True)
    def _setup(self, models: dict[str, Checkpoint], tmp_path: Path) -> None:
        self.model, self.path = models["demo"], tmp_path / "plan.json"
        self.plan = uniform_plan(self.model, param_ratio=0.8, kv_ratio=0.5)

    def refused(self, match: str, **changes: Any) -> None:
        self.path.write_text(json.dumps(self.plan.model_dump(mode="json") | changes))
        with pytest.raises(PlanError, match=match):
            read_plan(self.path, self.model)

    def section(self, **changes: Any) -> list[dict[str, Any]]:
        layers = [layer.model_dump(mode="json") for layer in self.plan.layers]
        return [layers[0] | changes, *layers[1:]]

    def test_a_written_plan_is_read_as_it_was(self) -> None:
        self.path.write_text(self.plan.model_dump_json())
        assert read_plan(self.path, self.model) == self.plan

    def test_another_models(self) -> None:
        self.refused("another model", model_config_sha256="0" * 64)

    def test_budgets_that_are_not_met(self) -> None:
        budget = self.plan.kv_elements.model_dump() | {"used": 1}
        self.refused("kv_elements: its layers have", kv_elements=budget)
        less = budget_of(0.5, self.model.layout.parameters)
        budget = less.model_dump() | {"used": self.plan.parameters.used}
        self.refused(f"of {less.allowed} allowed", param_ratio=0.5, parameters=budget)

    def test_budgets_that_are_not_the_ratios(self) -> None:
        self.refused("parameters: 0.9 of the model's", param_ratio=0.9)
        budget = self.plan.kv_elements.model_dump()
        for name in ("dense", "allowed"):
            changed = budget | {name: budget[name] + 1}
            self.refused("kv_elements: 0.5 of the model's", kv_elements=changed)

    def test_methods_that_do_not_make_its_layers(self) -> None:
        self.refused("key: only the method heads changes it", methods=["prune"])
        self.refused("intermediate_size: only the method prune", methods=["heads"])
        ranks = self.section(ranks={"mlp.up_proj": 64})
        self.refused("ranks: only the method lowrank", layers=ranks)

    def test_the_wrong_number_of_layers(self) -> None:
        self.refused("3 layers, .* has 4", layers=self.section()[:3])

    def test_dims_no_method_makes(self) -> None:
        key, value = {"form": "rotary", "heads": 4, "size": 64}, {"heads": 4, "size": 64}
        for match, section in {
            r"layers.0.value: 4 heads of 130": {"value": {"heads": 4, "size": 130}},
            r"layers.0.key: 1 heads": {
                "key": key | {"heads": 1},
                "value": {"heads": 1, "size": 64},
            },
            r"layers.0.intermediate_size: 1032": {"intermediate_size": 1032},
            r"layers.0.ranks.mlp.up_proj: 500": {"ranks": {"mlp.up_proj": 500}},
            r"query_heads: no method": {"key": key, "value": value, "query_heads": 4},
            r"odd 63": {"key": key | {"size": 63}},
        }.items():
            self.refused(match, layers=self.section(**section))

    def test_what_is_no_plan(self) -> None:
        self.refused("Extra inputs", extra=1)
        self.refused("layers.0.key.size", layers=self.section(key={"form": "rotary", "heads": 4}))
        self.path.write_text("{")
        with pytest.raises(PlanError, match="not valid JSON"):
            read_plan(self.path, self.model)


def test_expected_loss_adds_up_over_what_is_compressed(models: dict[str, Checkpoint]) -> None:
    dense = models["8B"].layout
    layer = dense.layers[0]
    narrow = replace(layer, intermediate_size=layer.intermediate_size // 2)
    small = replace(layer, value=replace(layer.value, size=64))
    both = replace(narrow, value=small.value)
    factorized = replace(layer, ranks=MappingProxyType({"mlp.up_proj": 2048}))
    loss = {
        name: expected_loss(dense, [one] * 32)
        for name, one in {"narrow": narrow, "small": small, "both": both, "f": factorized}.items()
    }
    assert expected_loss(dense, dense.layers) == 0
    assert loss["both"] == pytest.approx(loss["narrow"] + loss["small"])
    assert 0 < loss["f"] < loss["narrow"]
    half = expected_loss(dense, [narrow] * 16 + [layer] * 16)
    assert half == pytest.approx(loss["narrow"] / 2)


def test_a_plan_survives_json(models: dict[str, Checkpoint]) -> None:
    plan = uniform_plan(models["8B"], param_ratio=0.8, kv_ratio=0.5, methods=["heads", "lowrank"])
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert isinstance(again.layers[0], LayerSection)
    assert math.isfinite(again.notes["expected_loss"])
