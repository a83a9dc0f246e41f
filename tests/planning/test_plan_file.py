"""plan.json: a written plan is read back, and a plan that does not fit the model is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dense_models import config
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig, validate
from vllm_gac.planning.plan_file import exact_budget, read_plan
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

Models = dict[str, Checkpoint]


def model(directory: Path, **changes: Any) -> Checkpoint:
    """A model that consists only of its config."""
    raw = config(**changes)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    return Checkpoint(directory, raw, validate(HfConfig, raw, "config"), layout_of(raw), {})


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


class TestReading:
    """plan.json as somebody else may have written it."""

    @pytest.fixture(autouse=True)
    def _setup(self, models: Models, tmp_path: Path) -> None:
        self.model, self.path = models["demo"], tmp_path / "plan.json"
        self.plan = prior_plan(self.model, PlanRequest(param_ratio=0.8, kv_ratio=0.5))

    def refused(self, match: str, **changes: Any) -> None:
        self.path.write_text(json.dumps(self.plan.model_dump(mode="json") | changes))
        with pytest.raises(PlanError, match=match):
            read_plan(self.path, self.model)

    def section(self, **changes: Any) -> list[dict[str, Any]]:
        layers = [layer.model_dump(mode="json") for layer in self.plan.layers]
        return [layers[0] | changes, *layers[1:]]

    @pytest.mark.parametrize("align", ["none", "minimal", "measured", "optimal", "predefined"])
    def test_a_written_plan_is_read_as_it_was(self, align: Any) -> None:
        """Also by strategies that there were before."""
        plan = self.plan.model_copy(update={"align": align})
        self.path.write_text(plan.model_dump_json())
        assert read_plan(self.path, self.model) == plan

    def test_a_plan_of_another_model_is_refused(self) -> None:
        self.refused("plan.json: .*config.json", model_config_sha256="0" * 64)
        self.refused("plan.json: .*weights", model_weights_sha256="0" * 64)
        raw = self.plan.model_dump(mode="json", exclude={"model_weights_sha256"})
        self.path.write_text(json.dumps(raw))  # as plans were before
        assert read_plan(self.path, self.model).layers == self.plan.layers

    def test_budgets_that_are_not_met(self) -> None:
        budget = self.plan.kv_elements.model_dump() | {"used": 1}
        self.refused("kv_elements", kv_elements=budget)
        less = exact_budget(0.5, self.model.layout.parameters)
        budget = less.model_dump() | {"used": self.plan.parameters.used}
        self.refused(f"{less.allowed}", param_ratio=0.5, parameters=budget)

    def test_budgets_that_are_not_the_ratios(self) -> None:
        self.refused("parameters: 0.9", param_ratio=0.9)
        budget = self.plan.kv_elements.model_dump()
        for name in ("dense", "allowed"):
            changed = budget | {name: budget[name] + 1}
            self.refused("kv_elements: 0.5", kv_elements=changed)

    def test_methods_that_do_not_make_its_layers(self) -> None:
        self.refused("key: .*heads", methods=["prune"])
        self.refused("intermediate_size: .*prune", methods=["heads"])
        ranks = self.section(ranks={"mlp.up_proj": 64})
        self.refused("ranks: .*lowrank", layers=ranks)

    def test_the_wrong_number_of_layers(self) -> None:
        self.refused("3 layers.* 4", layers=self.section()[:3])

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
            r"query_heads": {"key": key, "value": value, "query_heads": 4},
            r"odd 63": {"key": key | {"size": 63}},
        }.items():
            self.refused(match, layers=self.section(**section))

    def test_invalid_plan_files_are_refused(self) -> None:
        self.refused("extra", extra=1)
        self.refused("version", version=2)
        self.refused(r"methods\.0", methods=["magic"])
        self.refused("layers.0.key.size", layers=self.section(key={"form": "rotary", "heads": 4}))
        self.path.write_text("{")
        with pytest.raises(PlanError, match=str(self.path)):
            read_plan(self.path, self.model)
