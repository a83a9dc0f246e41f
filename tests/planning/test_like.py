"""Planning again: aligned dims near another tool's, within the parameters and the cache of its."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.importers import tools
from tests.importers.layer_models import heterogeneous
from tests.importers.low_rank_models import write_low_rank
from tests.support import dense_models
from tests.support.command import error, result, usage
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.errors import CheckpointError, GacError, PlanError
from vllm_gac.layout.dims import LINEARS, ModelLayout, breakeven_rank
from vllm_gac.planning.knapsack_items import within_window
from vllm_gac.planning.like import OtherPlan, read_other, request_from_reference
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.planning.planner import plan, prior_plan
from vllm_gac.planning.request import PlanRequest

WHOLE = dense_models.config()
UNSHARED = dense_models.config(num_key_value_heads=4, head_dim=12)
# k_proj and v_proj are smaller: factors of a rank of 20 have more numbers than they.
RANKS = {
    f"model.layers.{i}.{name}": 17 + n % 2 + (0 if name[-6:] in ("k_proj", "v_proj") else i)
    for i in (0, 1)
    for n, name in enumerate(LINEARS)
}


def pruned(directory: Path) -> Path:
    fewer = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 61}
    model = heterogeneous(UNSHARED, [{"intermediate_size": 91}, fewer])
    return tools.write(directory, UNSHARED, model)


def ranks(directory: Path) -> Path:
    directory.mkdir()
    (directory / "ranks.json").write_text(json.dumps(RANKS))
    return directory / "ranks.json"


WRITTEN = {
    "asvd": (lambda path: write_low_rank(path, "asvd", RANKS)[0], WHOLE, ["lowrank"]),
    "svd-llm": (lambda path: write_low_rank(path, "svd-llm", RANKS)[0], WHOLE, ["lowrank"]),
    "hf-pruned": (pruned, UNSHARED, ["heads", "prune"]),
    "ranks": (ranks, WHOLE, ["lowrank"]),
}


@pytest.mark.parametrize("tool", WRITTEN)
def test_dims_are_aligned_near_the_tools_and_spend_no_more(tool: str, tmp_path: Path) -> None:
    write, raw, methods = WRITTEN[tool]
    dense = open_checkpoint(dense_models.write(tmp_path / "dense", raw))
    other = read_other(write(tmp_path / tool), dense)
    assert other.made_by == tool
    made = plan(dense.directory, like=write(tmp_path / "again"))
    layout = planned_layout(dense, made)
    assert made.methods == methods
    assert any(dim % 8 for _, _, dim in other.layout.dims())
    changed = [d for d in layout.dims() if d not in [*dense.layout.dims()]]
    assert changed
    assert all(dim % 8 == 0 for _, _, dim in changed)
    assert layout.parameters <= other.layout.parameters
    assert layout.kv_elements <= other.layout.kv_elements
    assert made.parameters.allowed == other.layout.parameters
    assert made.kv_elements.allowed == other.layout.kv_elements
    whole = dense.layout.layers[0]
    for layer, near in zip(layout.layers, other.layout.layers, strict=True):
        assert layer.ranks.keys() == near.ranks.keys(), "what was left whole stays whole"
        for field in ("key", "value", "intermediate_size"):
            kept = getattr(near, field) == getattr(whole, field)
            assert (getattr(layer, field) == getattr(whole, field)) == kept
        parts = ["self_attn.", "mlp."] if "prune" in methods else LINEARS
        assert all(within_window(dense.layout, layer, near, part) for part in parts)


@settings(max_examples=3, deadline=None)
@given(shares=st.lists(st.floats(0.4, 0.9), min_size=28, max_size=28))
def test_where_every_dim_is_allowed_the_tools_own_are_chosen(
    demo: Checkpoint, shares: list[float]
) -> None:
    """So the losses are those under which the tool's dims are the best of their cost."""
    dense, other = demo, of_shares(demo.layout, shares)
    request = request_from_reference(PlanRequest(align="none"), other)
    planned = planned_layout(dense, prior_plan(dense, request, other))
    for layer, near in zip(planned.layers, other.layout.layers, strict=True):
        for name in LINEARS:
            assert abs(layer.ranks[name] - near.ranks[name]) <= 2


def of_shares(dense: ModelLayout, shares: list[float]) -> OtherPlan:
    """The ranks that keep such shares of each linear's parameters, layer by layer."""
    left, layers = iter(shares), []
    for layer in dense.layers:
        own = {n: int(breakeven_rank(dense, layer, n, next(left))) for n in LINEARS}
        layers.append(replace(layer, ranks=MappingProxyType(own)))
    return OtherPlan("ranks", dense, replace(dense, layers=tuple(layers)))


def test_the_linear_whose_rank_was_kept_the_most_loses_the_least_of_it(demo: Checkpoint) -> None:
    """A tool's ranks are all that says what matters: the order of a linear's ranks stays."""
    other = of_shares(demo.layout, [0.5, 0.9, 0.7, 0.6] * 7)
    request = request_from_reference(PlanRequest(), other)
    planned = planned_layout(demo, prior_plan(demo, request, other))
    for name in LINEARS:
        kept = sorted(
            (near.ranks[name], layer.ranks.get(name, 1 << 20))
            for near, layer in zip(other.layout.layers, planned.layers, strict=True)
        )
        assert [rank for _, rank in kept] == sorted(rank for _, rank in kept)


def cut(path: Path) -> None:
    """Cut the last tensors off: what an interrupted download leaves."""
    file = path / "model.safetensors" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize("tool", ["asvd", "ranks"])
def test_a_damaged_file_is_refused_naming_it(tool: str, tmp_path: Path) -> None:
    write, raw, _ = WRITTEN[tool]
    dense = dense_models.write(tmp_path / "dense", raw)
    other = write(tmp_path / tool)
    if tool == "ranks":
        other.write_text(other.read_text()[:-9])
    else:
        cut(other)
    with pytest.raises(GacError, match=str(other)):
        plan(dense, like=other)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda r: r | {"model.layers.2.mlp.up_proj": 9}, "2.mlp.up_proj"),
        (lambda r: r | {"model.layers.1.mlp.up_proj": 0}, "1.mlp.up_proj"),
        (lambda r: r | {"model.layers.1.mlp.up_proj": "9"}, "1.mlp.up_proj"),
        (lambda r: dict.fromkeys(r, 48), "dense"),
        (lambda r: {}, ""),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    damage: Callable[[dict[str, int]], object], named: str, tmp_path: Path
) -> None:
    dense = dense_models.write(tmp_path / "dense", WHOLE)
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(damage(RANKS)))
    with pytest.raises(GacError, match=rf"ranks.json: .*{named}"):
        plan(dense, like=file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 3}, "2 .*dense 3"),
        ({"hidden_size": 40}, "48, .*dense 40"),
    ],
)
def test_a_model_of_another_size_has_no_plan_near_it(
    changes: dict[str, int], named: str, tmp_path: Path
) -> None:
    dense = dense_models.write(tmp_path / "dense", WHOLE | changes)
    with pytest.raises(PlanError, match=named):
        plan(dense, like=write_low_rank(tmp_path / "asvd", "asvd", RANKS)[0])


def test_the_dense_model_itself_is_no_plan(tmp_path: Path) -> None:
    dense = dense_models.write(tmp_path / "dense", WHOLE)
    with pytest.raises(PlanError, match=str(dense)):
        plan(dense, like=dense)


def test_budgets_and_methods_beside_it_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, other = dense_models.write(tmp_path / "dense", WHOLE), ranks(tmp_path / "ranks")
    for request in (PlanRequest(param_ratio=0.9), PlanRequest(methods=("heads",))):
        with pytest.raises(PlanError):
            plan(dense, request, like=other)
    for option in (("--kv-ratio", 0.5), ("--method", "prune"), ("--max-loss", "1%")):
        said = usage(capsys, "plan", dense, "--like", other, *option)
        assert said.count(option[0]) == said.count("--like") == 1


def test_dims_near_the_tools_may_all_spend_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, few = dense_models.write(tmp_path / "dense", WHOLE), tmp_path / "ranks.json"
    few.write_text(json.dumps({name: 7 for name in RANKS if "k_proj" in name}))
    said = error(capsys, "plan", dense, "--like", few)
    assert "--align minimal" in said
    assert result(capsys, "plan", dense, "--like", few, "--align", "none")["notes"]["gap"] == 0


def test_the_command_says_what_the_plan_is_like_and_compress_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, out = dense_models.write(tmp_path / "dense", WHOLE), tmp_path / "out"
    file, text = tmp_path / "plan.json", dense_models.write_text(tmp_path / "text.txt")
    other, _ = write_low_rank(tmp_path / "asvd", "asvd", RANKS)
    made = Plan.model_validate(
        result(capsys, "plan", dense, "--like", other, "--out", file, "--align", "minimal")
    )
    assert made.notes["like"] == {"made_by": "asvd", "dims": 14, "aligned": 0}
    done = result(
        capsys,
        *("compress", dense, "--out", out, "--plan", file, "--calibration", text),
        *("--max-tokens", 256, "--sequence-length", 64),
    )
    assert done["parameters"] == made.parameters.used <= made.parameters.allowed


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    dense = dense_models.write(tmp_path / "dense", WHOLE)
    with pytest.raises(CheckpointError, match="absent"):
        plan(dense, like=tmp_path / "absent")
