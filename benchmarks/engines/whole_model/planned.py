"""Models whose dims the planner chooses, by the losses of other models."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.llama3_8b import SERVED_IN_FP8, compressed, without_weights
from benchmarks.engines.whole_model.models import Model
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

GPU = "h200"
_HALF_CACHE = PlanRequest(param_ratio=0.8, kv_ratio=0.5, gpu=GPU)
_HALF_CACHE_FP8 = replace(_HALF_CACHE, **SERVED_IN_FP8)


def _low_rank(share: float) -> PlanRequest:
    return PlanRequest(param_ratio=share, methods=("lowrank",), gpu=GPU)


REQUESTS = {
    "planned": ("the planner's dims for 80 % of the parameters and half the cache", _HALF_CACHE),
    "planned-fp8": (
        "the same, planned for 64 requests of 1,250 tokens in FP8 with an FP8 cache",
        _HALF_CACHE_FP8,
    ),
    **{
        f"planned-low-rank-{percent}": (
            f"every linear low rank, the planner's ranks for {percent} % of the parameters",
            _low_rank(percent / 100),
        )
        for percent in (80, 90, 70)
    },
}


def planned(name: str, dense: dict[str, Any]) -> Model:
    """The model that REQUESTS names; a plan takes seconds."""
    what, request = REQUESTS[name]
    with tempfile.TemporaryDirectory() as folder:
        # A plan names the config that it is for. Dims are all that it needs beside.
        (Path(folder) / "config.json").write_text(json.dumps(dense))
        plan = prior_plan(without_weights(Path(folder), dense), request)
    layers = [layer.model_dump(mode="json") for layer in plan.layers]
    return Model(name, what, compressed(dense, layers), {"weights": "dummy"})
