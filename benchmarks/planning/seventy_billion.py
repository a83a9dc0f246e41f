"""What models of 70B need: to be calibrated, and to be served by one GPU of 80 GB. Arithmetic.

    python -m benchmarks.planning.seventy_billion OUT     # seventy_billion.json and .md; minutes

Plans are made without weights and without statistics, so they tell dims and bytes, and no loss.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.llama3_8b import DENSE, SERVED_IN_FP8, without_weights
from benchmarks.common.markdown import document, table_of_records
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.measured import Measured
from vllm_gac.compression.statistics_writer import stats_file
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.schema import METHODS
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate import ENOUGH, Kept, work_of
from vllm_gac.steps.calibrate_request import CalibrateRequest

COMMAND = "python -m benchmarks.planning.seventy_billion OUT"
_SHAPE = DENSE | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-70B": _SHAPE | {"intermediate_size": 28672},
    "Qwen2.5-72B": _SHAPE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 29568,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
# Shares of the parameters and of the cache that are kept.
BUDGETS = ((1.0, 1.0), (0.9, 0.75), (0.8, 0.5), (0.7, 0.5), (0.6, 0.5), (0.5, 0.5), (0.5, 0.25))
FP8 = {key: SERVED_IN_FP8[key] for key in ("quantization", "kv_cache_dtype")}
# Of the probes: the default, and fewer.
PROBE_TOKENS = (CalibrateRequest().probe_tokens, 512)
# What an H100 of 80 GB has, the share that vLLM takes of it by default, and an allowance for
# activations and CUDA graphs, which depend on the options of the server.
GPU_BYTES, SHARE, ALLOWANCE = 79 << 30, 0.92, 4 << 30


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_NEEDED = f"""\
For the default text, {ENOUGH} tokens for each channel of an MLP, as `calibrate` says it before it
begins. Weights are read one layer at a time, so that their size counts on disk only. Beside this
the disk holds the dense model and the compressed one. Compressing took half of calibration's GPU
memory at 8B's shape ([measured](quality/eight_billion.md)). On a CPU, GPU and host memory are one.
An H100 of 80 GB has {GPU_BYTES / 1e9:.0f} GB in all. With the default tokens for probes low rank
does not fit, and the rest hardly; with `--probe-tokens {PROBE_TOKENS[1]}` everything does."""
_SERVED = f"""\
Of {GPU_BYTES >> 30} GiB vLLM takes {_percent(SHARE)}, its default. What remains after the weights
and {ALLOWANCE >> 30} GiB for activations and CUDA graphs is cache; -: the weights leave no room.
In FP8 the linears of the layers have 8 bits, the embeddings and the head 16, and the plan's dims
are multiples that FP8 takes. **No loss is known**: the plans have no statistics, and no model of
this size was compressed or served here."""


def main() -> None:
    """Calculate both tables, and write the two files of the result."""
    args = arguments(__doc__).parse_args()
    result = provenance(COMMAND, "cpu", args.commit) | {"calibrated": [], "served": []}
    with tempfile.TemporaryDirectory() as work:
        for name, config in SHAPES.items():
            (Path(work) / "config.json").write_text(json.dumps(config))
            model = without_weights(Path(work), config)
            for methods in (METHODS, METHODS[:2]):
                for probe_tokens in PROBE_TOKENS:
                    row = calibrated(model.layout, methods, probe_tokens)
                    result["calibrated"].append({"shape": name} | row)
            result["served"] += [{"shape": name} | row for row in served(model)]
    save(args.out / "seventy_billion", result, page(result))


def calibrated(layout: ModelLayout, methods: tuple[Any, ...], probe_tokens: int) -> dict[str, Any]:
    """What calibration for `methods` needs, in GB."""
    kept = Kept.to_plan(layout, methods, probe_tokens)
    tokens = ENOUGH * layout.layers[0].intermediate_size
    measured = Measured.of(kept.metadata(tokens, CalibrateRequest().sequence_length))
    work = work_of(layout, stats_file(Path("stats"), layout, measured), measured)
    return {
        "methods": ", ".join(methods),
        "tokens": f"{tokens:,}",
        "for probes": f"{probe_tokens:,}",
        "GPU memory, GB": _giga(work.device_bytes),
        "host memory, GB": _giga(work.host_bytes),
        "disk, GB": _giga(work.disk_bytes),
        "of it statistics, GB": _giga(work.file_bytes),
    }


def served(model: Checkpoint) -> Iterator[dict[str, Any]]:
    """What a GPU holds of the model at each budget."""
    for parameters, cache in BUDGETS:
        for precision, options in (("bf16", {}), ("FP8", FP8)):
            layout = model.layout
            if (parameters, cache) != (1, 1):
                request = PlanRequest(param_ratio=parameters, kv_ratio=cache, **options)
                layout = planned_layout(model, prior_plan(model, request))
            weights = weight_bytes(layout, precision)
            token = layout.kv_elements * (1 if precision == "FP8" else 2)
            room = math.floor(GPU_BYTES * SHARE) - ALLOWANCE - weights
            yield {
                "parameters": _percent(parameters),
                "cache": _percent(cache),
                "precision": precision,
                "weights, GB": _giga(weights),
                "cache, bytes per token": f"{token:,}",
                "tokens on one GPU": f"{room // token:,}" if room >= token else None,
            }


def weight_bytes(layout: ModelLayout, precision: str) -> int:
    """Bytes of the weights; in FP8 embeddings and head stay in 16 bits."""
    ends = (2 - layout.tie_word_embeddings) * layout.vocab_size * layout.hidden_size
    return 2 * ends + (layout.parameters - ends) * (1 if precision == "FP8" else 2)


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    return document(
        "What models of 70B need",
        f"Arithmetic, not a measurement. {origin(result)}",
        "## To calibrate",
        _NEEDED,
        table_of_records(result["calibrated"]),
        "## To serve with one GPU of 80 GB",
        _SERVED,
        table_of_records(result["served"]),
    )


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f}"


if __name__ == "__main__":
    main()
