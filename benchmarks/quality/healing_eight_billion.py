"""Steps of healing a random model of Llama-3-8B's shape on one GPU: seconds and memory.

    python -m benchmarks.quality.healing_eight_billion OUT --device cuda

Writes healing_eight_billion.json and .md into OUT after each way of training. The weights are made
on the GPU, and nothing but the result is written.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.llama3_8b import DENSE, KV_RATIO, PARAM_RATIO, write_models
from benchmarks.common.markdown import document, table
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac.compression.reference_model import reference_of
from vllm_gac.healing.distillation import Distillation, Model
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.memory import Memory, memory, tokens_at_once
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.student import Student
from vllm_gac.healing.teacher import Teacher
from vllm_gac.healing.train import Healing, deterministic
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.schema import HfConfig

COMMAND = "python -m benchmarks.quality.healing_eight_billion OUT --device cuda"
LENGTH, ADAPTER_RANK = 512, 32
# What is trained: the rank of adapters, and whether Adam's moments are offloaded.
WAYS: dict[str, tuple[int | None, bool]] = {
    "whole weights": (None, False),
    f"adapters of rank {ADAPTER_RANK}": (ADAPTER_RANK, False),
    "whole weights, moments offloaded": (None, True),
}
RUNS = (20_000_000, 100_000_000)


def main() -> None:
    """Train in each way; write the table after each."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=DENSE["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, default=1 << 14)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    raw = DENSE | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as directory:
        layouts = write_models(Path(directory), raw)
    result = provenance(COMMAND, args.device, args.commit) | {
        "parameters": [layouts["gac"].parameters, layouts["dense"].parameters],
        "batch_tokens": args.batch_tokens,
        "layers": args.layers,
        "steps": args.steps,
        "rows": {},
    }
    for name in args.ways:
        result["rows"][name] = _measured(layouts, raw, WAYS[name], args)
        print(name, result["rows"][name], flush=True)
        save(args.out / "healing_eight_billion", result, page(result))
    print(page(result))


def _measured(
    layouts: Mapping[str, ModelLayout],
    raw: Mapping[str, Any],
    way: tuple[int | None, bool],
    args: argparse.Namespace,
) -> dict[str, Any]:
    (rank, offloaded), processes = way, Processes(torch.device(args.device))
    on_gpu = processes.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    gpu = torch.cuda.mem_get_info() if on_gpu else None
    at_once = tokens_at_once(layouts["gac"], layouts["dense"], gpu)
    teacher = Teacher(layouts["dense"], _random(layouts["dense"], processes.device), processes)
    student = Student(layouts["gac"], _random(layouts["gac"], processes.device), processes, rank)
    config = HfConfig.model_validate(dict(raw))
    dense, compressed = (
        reference_of(layouts[name], config, torch.float32, args.device) for name in ("dense", "gac")
    )
    distillation = Distillation(
        student=Model(compressed, student),
        teacher=Model(dense, teacher),
        rest=student.rest,
        processes=processes,
        temperature=1.0,
        hidden_weight=0.0,
        mixed=on_gpu,
        tokens_at_once=at_once,
    )
    batch = args.batch_tokens // LENGTH
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(raw["vocab_size"], (batch * args.steps, LENGTH), generator=generator)
    steps = Schedule(len(tokens), batch, args.steps, learning_rate=1e-5)
    run = (distillation, student, tokens, tokens[:batch], steps, Path("unused"), "", offloaded)
    seconds = _seconds(Healing(*run), steps, processes)
    begun = time.monotonic()
    found, _ = distillation.score(tokens[:batch])
    needed: Memory = memory(layouts["gac"], layouts["dense"], (2, 2), at_once, rank)
    if offloaded:
        needed = needed.with_averages_in_host_memory
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "measuring": time.monotonic() - begun,
        "divergence": found.divergence,
        "tokens_at_once": at_once,
        "gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None,
        "expected_gb": needed.total / 1e9,
        "expected_host_gb": needed.host / 1e9,
    }


def _seconds(healing: Healing, steps: Schedule, processes: Processes) -> list[float]:
    """The time of each step."""
    score, taken = Score(0.0, 0.0), []
    guard = Guard(score, 0.0, best=score)
    with deterministic(processes.device):
        for step in range(steps.steps):
            begun = time.monotonic()
            finite = healing.step(step, guard)
            if processes.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.monotonic() - begun)
            print(f"step {step}: {taken[-1]:.2f} s", flush=True)
            assert finite
    return taken


def _random(layout: ModelLayout, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Reads random weights in bf16, and RoPE frequencies that are as good as any."""
    generator, shapes = torch.Generator(device).manual_seed(0), layout.tensors()

    def read(name: str) -> torch.Tensor:
        shape = shapes[name]
        if name.endswith("rope_inv_freq"):
            return torch.rand(shape, generator=generator, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        random = torch.randn(shape, generator=generator, device=device)
        return (random * shape[-1] ** -0.5).bfloat16()

    return read


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    student, teacher = result["parameters"]
    rows = []
    for name, found in result["rows"].items():
        speed = result["batch_tokens"] / found["seconds"]
        rows.append(
            (
                name,
                f"{found['seconds']:.2f}",
                f"{speed:,.0f}",
                None if found["gpu_gb"] is None else f"{found['gpu_gb']:.1f}",
                f"{found['expected_gb']:.1f}",
                f"{found['expected_host_gb']:.1f}",
                *(f"{count / speed / 3600:.1f}" for count in RUNS),
            )
        )
    columns = (
        "trained",
        "seconds a step",
        "tokens a second",
        "GB of the GPU",
        "GB expected",
        "GB of the host, expected",
        *(f"hours for {count // 10**6} M tokens, predicted" for count in RUNS),
    )
    return document(
        "Healing a model of Llama-3-8B's shape on one GPU",
        f"Random weights in bf16: a student of {student:,} parameters ({PARAM_RATIO} of the dense "
        f"ones, KV {KV_RATIO}) beside its teacher of {teacher:,}, {result['layers']} layers. The "
        f"median of {result['steps']} steps of {result['batch_tokens']:,} tokens in sequences of "
        f"{LENGTH}. Measuring held-out text and saving come on top.",
        f"{origin(result)}.",
        table(columns, rows),
    )


if __name__ == "__main__":
    main()
