"""Calibrate, plan and compress a random model of Llama-3-8B's shape: minutes and memory.

    python -m benchmarks.quality.eight_billion OUT [--device cuda] [--directory /dev/shm]

Writes eight_billion.json and .md into OUT. The models (16 GB) and statistics (18.5 GB) are written
to --directory and removed at the end. Calibration prints the memory that it expects, for
comparison.
"""

import argparse
import json
import logging
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.llama3_8b import DENSE
from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.dims import layout_of
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.calibrate_request import CalibrateRequest
from vllm_gac.steps.compress import compress

# Llama-3-70B: its layers, and the FLOPs of a layer as a multiple of the 8B model's. Eigenvectors
# and inverses of covariances grow with the cube of the hidden size, 8192 against 4096.
LAYERS_70B, WORK_70B = 80, 8
COMMAND = "python -m benchmarks.quality.eight_billion OUT --device cuda"


def main() -> None:
    """Run each step once."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--layers", type=int, default=DENSE["num_hidden_layers"])
    parser.add_argument("--tokens", type=int, default=1 << 15)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with TemporaryDirectory(prefix="eight-billion-", dir=args.directory) as work:
        result = provenance(COMMAND, args.device, args.commit) | _run(args, Path(work))
    text = page(result)
    save(args.out / "eight_billion", result, text)
    print(text)


def _run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    model, stats, plan = work / "model", work / "stats.safetensors", work / "plan.json"
    _write_model(model, args.layers, args.device)
    steps: dict[str, Any] = {}

    def step(name: str, act: Callable[[], None]) -> None:
        if args.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        act()
        steps[name] = {"seconds": time.monotonic() - begun}
        if args.device.startswith("cuda"):
            steps[name]["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(name, steps[name], flush=True)

    def planned() -> None:
        asked = PlanRequest(param_ratio=0.8, kv_ratio=0.75)
        plan.write_text(measured_plan(open_checkpoint(model), stats, asked).model_dump_json())

    step(
        "calibrate",
        lambda: calibrate(
            model,
            [demo.CALIBRATION],
            stats,
            CalibrateRequest(methods=("heads", "prune"), max_tokens=args.tokens),
            device=args.device,
        ),
    )
    step("plan", planned)
    step(
        "compress",
        lambda: _ignore(compress(model, work / "out", plan, stats=stats, device=args.device)),
    )
    return {
        "layers": args.layers,
        "tokens": args.tokens,
        "steps": steps,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "stats_gb": stats.stat().st_size / 1e9,
    }


def _ignore(result: object) -> None:
    """Drop the result of a step."""


def _write_model(directory: Path, layers: int, device: str) -> None:
    """Random weights in bf16, one shard a layer, with the demo model's tokenizer."""
    raw = DENSE | {"num_hidden_layers": layers}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    shutil.copy(demo.MODEL / "tokenizer.json", directory)
    generator = torch.Generator(device).manual_seed(0)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in layout_of(raw).tensors().items():
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            random = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
            tensor = random.to("cpu", torch.bfloat16)
        parts = name.split(".")
        shards.setdefault(parts[2] if parts[1] == "layers" else "ends", {})[name] = tensor
        if len(shards) > 2:  # the layer before the last one is complete
            _save(directory, shards, next(key for key in shards if key != "ends"))
    for key in list(shards):
        _save(directory, shards, key)


def _save(directory: Path, shards: dict[str, dict[str, torch.Tensor]], key: str) -> None:
    save_file(shards.pop(key), directory / f"model-{key}.safetensors")


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "# Compressing a model of Llama-3-8B's shape",
        "",
        f"Random weights, {result['layers']} layers, {result['tokens']:,} calibration tokens, "
        f"heads and MLPs at parameters 0.8 and KV 0.75. {origin(result)}. "
        f"Statistics {result['stats_gb']:.1f} GB; largest resident memory "
        f"{result['peak_rss_gib']:.1f} GiB, files mapped into memory included.",
        "",
    ]
    rows = []
    scale = LAYERS_70B / result["layers"] * WORK_70B
    for name, values in result["steps"].items():
        later = "-" if name == "plan" else f"at most {values['seconds'] * scale / 60:.0f} minutes"
        memory = f"{values['gpu_gib']:.1f} GiB" if "gpu_gib" in values else "-"
        rows.append([name, f"{values['seconds'] / 60:.2f}", memory, later])
    columns = ["step", "minutes", "peak GPU memory", "a 70B model, predicted"]
    return "\n".join([*lines, *table(columns, rows)]) + "\n"


if __name__ == "__main__":
    main()
