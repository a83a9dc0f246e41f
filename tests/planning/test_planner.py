"""The planner: exact budgets, the best choice, and a reason if no choice is feasible."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.common.llama3_8b import DENSE as LLAMA_8B
from tests.planning.test_plan_file import Models, model
from tests.support.dense_models import config
from tests.support.measured_layers import made_up_losses
from vllm_gac.alignment.rules import QuantizationMultiples, align, padded_layout
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.methods.heads.method import attention_candidates
from vllm_gac.errors import PlanError
from vllm_gac.gpu.decode_fit import check_layer
from vllm_gac.gpu.latency.layer import BatchMix, Deployment, mlp_microseconds
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, layout_of
from vllm_gac.planning.knapsack_items import choices_of, part_candidates, part_parameters
from vllm_gac.planning.losses import with_fp8_cache
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import best_plan, check_feasible, prior_plan
from vllm_gac.planning.problem import Problem, Problems
from vllm_gac.planning.request import PlanRequest

H200 = Deployment(read_profile("h200"), BatchMix())


@settings(max_examples=25)
@given(
    name=st.sampled_from(["big", "demo", "tiny", "mha", "odd"]),
    param_ratio=st.floats(0.3, 1.0),
    kv_ratio=st.floats(0.05, 1.0),
    methods=st.sets(st.sampled_from(["heads", "prune", "lowrank"]), min_size=1),
    strategy=st.sampled_from(["minimal", "measured"]),
    key_form=st.sampled_from(["auto", "rotary", "latent"]),
    seed=st.none() | st.integers(0, 3),
)
def test_no_budget_is_exceeded_and_every_dim_is_an_allowed_one(
    models: Models,
    name: str,
    param_ratio: float,
    kv_ratio: float,
    methods: set[str],
    strategy: Any,
    key_form: str,
    seed: int | None,
) -> None:
    """By the losses of other models, without a seed, or by some that are made up."""
    dense = models[name].layout
    request = PlanRequest(
        param_ratio=param_ratio,
        kv_ratio=kv_ratio,
        methods=sorted(methods),
        align=strategy,
        key_form=key_form if "heads" in methods else "auto",
    )
    try:
        if seed is None:
            plan = prior_plan(models[name], request)
        else:
            plan = best_plan(models[name], made_up_losses(dense, seed), request)
    except PlanError as e:
        said = str(e)
        assert "feasible" in said or "no aligned size" in said or name in ("tiny", "mha", "odd")
        return
    layout = planned_layout(models[name], plan)
    budgets = (plan.parameters, plan.kv_elements)
    assert (layout.parameters, layout.kv_elements) == tuple(budget.used for budget in budgets)
    assert layout.parameters <= Fraction(str(param_ratio)) * dense.parameters
    assert layout.kv_elements <= Fraction(str(kv_ratio)) * dense.kv_elements
    whole = {dense.head_dim, 2 * dense.head_dim, dense.layers[0].intermediate_size}
    for where, role, dim in layout.dims():
        assert dim == align(dim, strategy, role) or dim in whole, (where, dim)


def test_pruning_beside_low_rank_loses_no_more_than_either(demo: Checkpoint) -> None:
    losses = made_up_losses(demo.layout)
    plans = [
        best_plan(demo, losses, PlanRequest(param_ratio=0.7, kv_ratio=0.75, methods=methods))
        for methods in (("heads", "prune"), ("heads", "lowrank"), ("heads", "prune", "lowrank"))
    ]
    pruned, factorized, both = (plan.expected_loss or 0.0 for plan in plans)
    assert both <= pruned
    assert both <= factorized
    full = demo.layout.layers[0].intermediate_size
    for layer in planned_layout(demo, plans[-1]).layers:
        has_ranks = any(name.startswith("mlp.") for name in layer.ranks)
        assert layer.intermediate_size == full or not has_ranks


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("demo", {"methods": ("heads", "prune"), "kv_ratio": 0.8}),
        ("big", {"methods": ("prune", "lowrank"), "quantization": "fp8_per_tensor"}),
    ],
)
def test_no_plan_with_a_time_limit_that_loses_as_little_is_faster(
    models: Models, name: str, given: dict[str, Any]
) -> None:
    dense, losses = models[name], made_up_losses(models[name].layout)
    fastest = [best_plan(dense, losses, PlanRequest(**given, max_loss=m)) for m in (0.02, 0.04)]
    limited = [
        best_plan(dense, losses, PlanRequest(**given, latency_ratio=ratio))
        for ratio in (0.8, 0.75, 0.7, 0.6)
    ]
    for plan, asked in zip(fastest, (0.02, 0.04), strict=True):
        most = math.log1p(asked)
        assert plan.nanoseconds is not None
        assert (plan.expected_loss or 0) <= most
        times = [
            other.nanoseconds.used
            for other in limited
            if other.nanoseconds is not None and (other.expected_loss or 0) <= most
        ]
        assert times
        assert plan.nanoseconds.used <= min(times)
    assert fastest[1].nanoseconds.used < fastest[0].nanoseconds.used  # type: ignore[union-attr]


@settings(max_examples=25, deadline=None)
@example(
    most=1 / 32,
    methods=("heads",),
    types=("fp8_per_tensor", "fp8", 1, 1),
    batch=14,
    context=11,
)
@given(
    most=st.floats(0.001, 0.3),
    methods=st.sampled_from([("prune",), ("heads",), ("heads", "prune")]),
    types=st.sampled_from([(None, "auto", 2, 2), ("fp8_per_tensor", "fp8", 1, 1)]),
    batch=st.integers(1, 64),
    context=st.integers(1, 4096),
)
def test_no_choice_that_loses_as_little_has_fewer_bytes(
    models: Models,
    most: float,
    methods: tuple[str, ...],
    types: tuple[str | None, str, int, int],
    batch: int,
    context: int,
) -> None:
    """Every choice for the two layers of a tiny model is tried."""
    dense, losses = models["tiny"].layout, made_up_losses(models["tiny"].layout)
    quantization, cache, of_weight, of_cached = types
    request = PlanRequest(
        max_loss=most,
        minimize="bytes",
        methods=methods,
        quantization=quantization,
        kv_cache_dtype=cache,
        decode_batch=batch,
        decode_context=context,
    )
    plan = best_plan(models["tiny"], losses, request)

    def held(layers: Sequence[LayerLayout]) -> int:
        model = replace(dense, layers=tuple(layers))
        shapes = {n: math.prod(s) for n, s in model.tensors().items() if "inv_freq" not in n}
        # What rebuilds latent keys is no linear: vLLM does not quantize it.
        quantized = {n for n in shapes if "_proj." in n and ".k_up_proj." not in n}
        linears = sum(shapes[n] for n in quantized)
        weights = 2 * (sum(shapes.values()) - linears) + of_weight * linears
        return weights + of_cached * batch * context * model.kv_elements

    parts = part_candidates(dense, request, request.deployment())
    layers, saved, counts = [], [], []
    for chosen in itertools.product(*(range(len(part.layers)) for part in parts)):
        layer = dense.layers[0]
        for part, number in zip(parts, chosen, strict=True):
            layer = part.put(layer, part.layers[number])
        layers.append(chosen)
        saved.append(held(dense.layers) - held([layer, dense.layers[1]]))
        other = replace(dense, layers=(layer, dense.layers[1]))
        counts.append((other.parameters - dense.parameters, other.kv_elements - dense.kv_elements))
    lost = [
        [
            sum(part.losses(of)[n] for part, n in zip(parts, chosen, strict=True))
            for chosen in layers
        ]
        for of in losses
    ]
    allowed = np.add.outer(*map(np.array, lost)) <= math.log1p(most)
    # A merged head may be larger than a dense one. No plan has more parameters or more cache than
    # the dense model, even if it has fewer bytes.
    for count in np.array(counts).T:
        allowed &= np.add.outer(count, count) <= 0
    best = np.where(allowed, np.add.outer(saved, saved), -1).max()
    assert plan.notes["bytes"] == {
        "dense": held(dense.layers),
        "used": held(dense.layers) - best,
    }
    assert held(planned_layout(models["tiny"], plan).layers) == plan.notes["bytes"]["used"]


def test_a_loss_that_other_budgets_do_not_allow_is_answered_with_the_least(
    demo: Checkpoint,
) -> None:
    losses = made_up_losses(demo.layout)
    given: Any = {"methods": ("heads", "prune"), "kv_ratio": 0.3}
    with pytest.raises(PlanError, match=r"--max-loss 0\.01%") as caught:
        best_plan(demo, losses, PlanRequest(**given, max_loss=1e-4))
    least = float(str(caught.value).split("lose ")[1].split("%")[0]) / 100
    best_plan(demo, losses, PlanRequest(**given, max_loss=least + 1e-4))


def test_where_times_are_predicted_a_plan_that_loses_about_as_little_is_the_fastest(
    models: Models,
) -> None:
    big, request = models["big"], PlanRequest(kv_ratio=0.5, methods=("heads",), gpu="h200")
    losses = made_up_losses(big.layout)
    plain = best_plan(big, losses, replace(request, gpu=None))
    faster = best_plan(big, losses, request)
    assert plain.nanoseconds is None
    assert plain.expected_loss is not None
    assert faster.expected_loss is not None
    assert plain.expected_loss < faster.expected_loss <= 1.02 * plain.expected_loss
    assert faster.kv_elements.used <= plain.kv_elements.allowed
    deployment = request.deployment()
    assert deployment is not None
    times = [
        deployment.nanoseconds(big.layout, planned_layout(big, plan).layers)
        for plan in (faster, plain)
    ]
    assert times[0] < times[1]


def test_a_plan_that_is_expected_to_lose_all_is_made_where_times_are_predicted(
    models: Models,
) -> None:
    """Keys that stay whole may be expected to lose many nats in an FP8 cache."""
    big = models["big"]
    losses = [
        {part: 10_000 * curve for part, curve in curves.items()}
        for curves in made_up_losses(big.layout)
    ]
    plan = best_plan(big, losses, PlanRequest(kv_ratio=0.5, methods=("heads",), gpu="h200"))
    assert plan.expected_loss is not None
    assert plan.expected_loss > 1


def test_each_of_several_gpus_is_predicted_its_part(models: Models) -> None:
    big, request = models["big"], PlanRequest(kv_ratio=0.5, gpu="h200")
    one, two = (
        best_plan(big, made_up_losses(big.layout), replace(request, tensor_parallel_size=tp))
        for tp in (1, 2)
    )
    assert one.nanoseconds is not None
    assert two.nanoseconds is not None
    for time in ("dense", "used"):
        assert 0.4 < getattr(two.nanoseconds, time) / getattr(one.nanoseconds, time) < 0.95
    assert two.notes["deployment"] == f"2 x {one.notes['deployment']}"
    assert "all-reduce" in str(two.notes)


FP8 = {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"}
LIGHT = {"decode_batch": 1, "decode_context": 128, "prefill_tokens": 16}
HEAVY = {"decode_batch": 64, "decode_context": 1250}
LOW_RANK: dict[str, Any] = {"param_ratio": 0.9, "methods": ("lowrank",)}
LIMITED, SLOWER = "the dense model's time was taken as a limit", "slower than the dense model"


@pytest.mark.parametrize(
    ("gpu", "name", "given", "limit", "said"),
    [
        ("h100", "big", LIGHT | LOW_RANK | FP8, "dense model", ""),
        ("h200", "big", LIGHT | LOW_RANK | FP8 | {"param_ratio": 0.8}, "dense model", LIMITED),
        ("h200", "big", HEAVY | LOW_RANK | FP8, "dense model", ""),
        ("h100", "big", LIGHT | {"kv_ratio": 0.9, "methods": ("heads",)}, "dense model", ""),
        ("h100", "demo", LIGHT | LOW_RANK | FP8, "none", SLOWER),
        ("h100", "demo", LIGHT | LOW_RANK | FP8 | {"latency": 1e5}, "request", SLOWER),
        ("h200", "demo", HEAVY | LOW_RANK | {"param_ratio": 0.7}, "none", SLOWER),
    ],
)
def test_a_plan_is_slower_than_dense_only_if_nothing_else_fits(
    models: Models, gpu: str, name: str, given: dict[str, Any], limit: str, said: str
) -> None:
    """In a small model, every factor is one launch more; in a large one, fewer are less time."""
    model, request = models[name], PlanRequest(gpu=gpu, **given)
    losses, deployment = made_up_losses(model.layout), request.deployment()
    plan = best_plan(model, losses, request)
    assert plan.nanoseconds is not None
    assert deployment is not None
    layers = planned_layout(model, plan).layers
    dense, used = plan.nanoseconds.dense, plan.nanoseconds.used
    assert dense == pytest.approx(1000 * deployment.dense_microseconds(model.layout), abs=1)
    assert used == pytest.approx(deployment.nanoseconds(model.layout, layers), abs=1)
    assert (plan.notes["time_limit"], used > dense) == (limit, said == SLOWER)
    times = "; ".join(plan.notes.get("times", ()))
    assert times.startswith(said)
    assert ("FP8" in times) == (gpu == "h100" and request.quantization is not None)
    assert not said or f"dense model's {dense / 1000:,.0f}" in times
    if used > dense:
        assert f"{used / 1000:,.0f} us a step, {used / dense:.2f} times the dense" in times
        with pytest.raises(PlanError, match="--latency"):
            best_plan(model, losses, replace(request, latency=None, latency_ratio=1.0))


def test_times_of_types_that_no_profile_has_are_said_to_be_of_16_bits() -> None:
    request = PlanRequest(quantization="mxfp4")
    (said,) = request.about_times(H200.profile)
    assert "mxfp4" in said
    assert request.types == PlanRequest().types


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("form", ["rotary", "latent"])
def test_attention_that_no_kernel_serves_is_no_candidate(form: str, cache: str) -> None:
    request = PlanRequest(methods=("heads",), key_form=form, kv_cache_dtype=cache)
    itemsizes = (1,) if cache == "fp8" else (2,)
    for size in (128, 256):
        dense = layout_of(config(**LLAMA_8B | {"head_dim": size}))
        every = [*attention_candidates(choices_of(dense, request, None))]
        (part,) = part_candidates(dense, request, None)
        for layer in part.layers:
            check_layer(dense, layer, itemsizes=itemsizes)
            assert max(dense.query_size(layer), layer.value.size) <= 256
        assert dense.layers[0] in part.layers or form == "latent"
        assert (list(part.layers) == every) == (size == 128)


def test_candidates_fit_the_shared_memory_of_the_gpu(models: Models, tmp_path: Path) -> None:
    """An Ada has less shared memory than a Hopper."""
    dense, path = models["big"].layout, tmp_path / "ada.json"
    write_profile(path, H200.profile.model_copy(update={"capability": (8, 9)}))
    offered = []
    for gpu, capability in (("h200", (9, 0)), (str(path), (8, 9))):
        request = PlanRequest(methods=("heads",), key_form="latent", gpu=gpu)
        (part,) = part_candidates(dense, request, request.deployment())
        for layer in part.layers:
            check_layer(dense, layer, capability, itemsizes=(2,))
        offered.append(len(part.layers))
    assert offered[0] > offered[1] > 0


def test_heads_that_no_kernel_takes_are_refused_or_stay(tmp_path: Path) -> None:
    """Latent keys of larger heads than prefill takes are rebuilt to such heads, however small."""
    large = model(tmp_path / "large", **LLAMA_8B | {"head_dim": 512})
    with pytest.raises(PlanError, match="--key-form latent"):
        prior_plan(large, PlanRequest(methods=("heads",), key_form="latent"))
    assert planned_layout(large, prior_plan(large, PlanRequest())) == large.layout


def test_a_dim_that_takes_as_long_as_a_larger_one_is_not_chosen(models: Models) -> None:
    big = models["big"]
    request = PlanRequest(methods=("prune",), gpu="h200")
    (item,) = part_candidates(big.layout, request, H200)
    (every,) = part_candidates(big.layout, request, None)

    def time(layer: LayerLayout) -> float:
        return mlp_microseconds(big.layout, layer, H200)

    times = [time(layer) for layer in item.layers]
    assert times == sorted(set(times))
    kept = {layer.intermediate_size for layer in item.layers}
    dropped = [a for a in every.layers if a.intermediate_size not in kept]
    assert dropped
    for layer in dropped:
        larger = [a for a in item.layers if a.intermediate_size > layer.intermediate_size]
        assert min(map(time, larger)) <= time(layer)


@pytest.mark.parametrize("limit", [{}, {"latency_ratio": 0.9}])
def test_linears_are_parts_of_their_own_unless_time_counts(
    models: Models, limit: dict[str, float]
) -> None:
    big = models["big"].layout
    request = PlanRequest(methods=("lowrank",), gpu="h200", **limit)  # type: ignore[arg-type]
    parts = part_candidates(big, request, H200)
    assert len(parts) == (4 if limit else 7)
    assert sorted(name for part in parts for name in part.prefix) == sorted(LINEARS)
    whole = sum(part_parameters(big, big.layers[0], part.prefix) for part in parts)
    assert whole == part_parameters(big, big.layers[0], ("self_attn.", "mlp."))
    for part in parts:
        assert part.layers[0] == big.layers[0]
        assert all(layer.ranks.keys() <= set(part.prefix) for layer in part.layers)
        assert not limit or part.costs[0, 2] == 0


@pytest.mark.parametrize("methods", [("lowrank",), ("heads", "prune", "lowrank")])
@pytest.mark.parametrize("quantization", [None, "fp8_per_tensor"])
def test_times_of_parts_add_up_to_the_layers(
    models: Models, methods: tuple[str, ...], quantization: str | None
) -> None:
    """In FP8, what our SwiGLU gains is lost once, however many halves of an MLP have ranks."""
    request = PlanRequest(methods=methods, latency_ratio=0.8, quantization=quantization, gpu="h200")
    problem = Problem(request, models["big"])
    dense, deployment = models["big"].layout, problem.deployment
    assert deployment is not None
    parts = part_candidates(dense, request, deployment)
    before = deployment.nanoseconds(dense, dense.layers[:1])
    rng = np.random.default_rng(0)
    for _ in range(20):
        layer, sum_of_parts = dense.layers[0], before
        for part in parts:
            position = rng.integers(len(part.layers))
            layer = part.put(layer, part.layers[position])
            sum_of_parts += part.costs[position, 2]
        assert abs(deployment.nanoseconds(dense, [layer]) - sum_of_parts) <= len(parts)


def test_keys_that_fp8_rounds_away_are_cached_as_latents(models: Models) -> None:
    """As in the first layer of a Qwen2, whose biases are hundreds of times the rest of a key."""
    big = models["big"]
    losses = [dict(layer) for layer in made_up_losses(big.layout)]
    size = big.layout.head_dim
    for name in ("rotary1", "latent1"):
        losses[0][name] = losses[0][name] + np.where(np.arange(size + 1) == 0, 1000.0, 0.0)
    for layer in losses:
        layer["width"][:] = 0  # so that up-projections cost nothing
    whole = PlanRequest(param_ratio=0.9)
    forms = {
        fp8: [
            (layer.key.form, layer.key.size)
            for layer in best_plan(big, with_fp8_cache(losses) if fp8 else losses, whole).layers
        ]
        for fp8 in (False, True)
    }
    rotary, latent = ("rotary", size), ("latent", size)
    assert set(forms[False]) == {rotary}
    assert forms[True][0] == latent
    assert set(forms[True][1:]) == {rotary}
    rounded, asked = with_fp8_cache(losses), PlanRequest(max_loss=0.01)
    assert best_plan(big, rounded, asked).layers[0].key.form == "latent"  # of all methods
    with pytest.raises(PlanError, match=r"--max-loss 1\.00%.* heads .*FP8"):
        best_plan(big, rounded, replace(asked, methods=("prune", "lowrank")))
    pruned = best_plan(big, rounded, PlanRequest(param_ratio=0.9, methods=("prune",)))
    assert pruned.expected_loss == pytest.approx(1000 * 3 / (8 * math.log(2)) / 768, rel=1e-3)


@pytest.mark.parametrize(
    ("quantization", "cache", "quantized"),
    [
        ("fp8_per_channel", "fp8", QuantizationMultiples(16, 16)),
        ("fp8_per_block", "auto", QuantizationMultiples(128)),
    ],
)
@pytest.mark.parametrize("tp", [1, 4])
def test_planned_dims_need_no_padding_for_quantization(
    models: Models, quantization: str, cache: str, quantized: QuantizationMultiples, tp: int
) -> None:
    big = models["big"]
    request = PlanRequest(
        param_ratio=0.7,
        kv_ratio=0.6,
        methods=("heads", "prune", "lowrank"),
        tensor_parallel_size=tp,
        quantization=quantization,
        kv_cache_dtype=cache,
    )
    planned = planned_layout(big, best_plan(big, made_up_losses(big.layout), request))
    assert padded_layout(planned, "minimal", None, tp, quantized) == planned
    for layer in planned.layers:
        assert layer.key.heads % tp == layer.value.heads % tp == 0


@pytest.mark.parametrize("ratio", ["param_ratio", "kv_ratio"])
def test_an_infeasible_budget_names_the_least_that_is_feasible(
    demo: Checkpoint, ratio: str
) -> None:
    losses = made_up_losses(demo.layout)
    flag = "--" + ratio.replace("_", "-")
    with pytest.raises(PlanError, match=rf"{flag} 0.02: .* 0\.\d+") as caught:
        Problem(PlanRequest(**{ratio: 0.02}), demo).check_feasible()
    assert re.search(r"\(self_attn 0\.\d+.*\)$", str(caught.value))  # parts of the smallest plan
    least = float(str(caught.value).split("at least ")[1].split()[0])
    best_plan(demo, losses, PlanRequest(**{ratio: least}))
    with pytest.raises(PlanError, match="--"):
        best_plan(demo, losses, PlanRequest(**{ratio: least - 2e-4}))


def test_a_budget_that_fewer_methods_keep_is_feasible(tmp_path: Path) -> None:
    """Attention has a few shares for ranks beside heads, and any rank without them."""
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024}
    dense = model(tmp_path, **LLAMA_8B | qwen3 | {"num_hidden_layers": 4})
    request = PlanRequest(param_ratio=0.04, methods=("heads", "lowrank"))
    with pytest.raises(PlanError, match="--param-ratio"):
        Problem(request, dense).check_feasible()
    check_feasible(request, Problems(dense))
    assert prior_plan(dense, request).methods
    with pytest.raises(PlanError, match=r"--param-ratio .* 0\.0[23]"):
        check_feasible(replace(request, param_ratio=0.01), Problems(dense))


@pytest.mark.parametrize("batch", [1, 64, 256])
def test_an_infeasible_time_is_explained(demo: Checkpoint, batch: int) -> None:
    request = PlanRequest(gpu="h200", latency=1.0, decode_batch=batch)
    with pytest.raises(PlanError, match=r"--latency 1\.0: .* \d+ microseconds") as caught:
        best_plan(demo, made_up_losses(demo.layout), request)
    needed = float(str(caught.value).split("at least ")[1].split()[0])
    Problem(replace(request, latency=needed), demo).check_feasible()


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_there_are_many_widths_for_any_number_of_gpus(tp: int) -> None:
    widths = PlanRequest(tensor_parallel_size=tp).up_to(4864, "width")
    assert len(widths) > 16
    assert all(width % (16 * tp) == 0 for width in widths)


def test_a_compressed_model_is_not_planned_for(tmp_path: Path) -> None:
    raw = config()
    raw |= {"architectures": ["GacLlamaForCausalLM"], "gac": layout_of(raw).section()}
    compressed = model(tmp_path / "m")
    compressed = replace(
        compressed, config=compressed.config.model_validate(json.loads(json.dumps(raw)))
    )
    with pytest.raises(PlanError, match=str(compressed.directory)):
        best_plan(compressed, made_up_losses(compressed.layout), PlanRequest(kv_ratio=0.5))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"latency": 5.0, "latency_ratio": 0.5}, "--latency and --latency-ratio"),
        ({"max_loss": 0.01, "latency_ratio": 0.5}, "--max-loss"),
        ({"minimize": "bytes", "kv_ratio": 0.5}, "--minimize bytes"),
    ],
)
def test_conflicting_options_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanRequest(**given)
