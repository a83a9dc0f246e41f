"""Ten steps of healing a random model of Llama-3-8B's shape: seconds and memory.

    python -m benchmarks.quality.healing_eight_billion OUT [--device cuda]
    torchrun --nproc-per-node 2 -m benchmarks.quality.healing_eight_billion OUT --device cuda

Writes healing_eight_billion.json and .md into OUT; with several processes, the name ends in their
number. The weights are made on the GPU, and nothing but the result is written.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.llama3_8b import DENSE, KV_RATIO, PARAM_RATIO, write_models
from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac.compression.reference_model import Reference
from vllm_gac.healing.distillation import Distillation, Model
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.memory import memory
from vllm_gac.healing.processes import Processes, together
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.student import Student
from vllm_gac.healing.teacher import Teacher
from vllm_gac.healing.train import Healing, deterministic
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import HfConfig

COMMAND = "python -m benchmarks.quality.healing_eight_billion OUT --device cuda"
LENGTH, ADAPTER_RANK = 512, 32
# What is trained: the rank of adapters, and whether Adam's averages lie in host memory.
WAYS: dict[str, tuple[int | None, bool]] = {
    "whole weights": (None, False),
    "whole weights, averages in host memory": (None, True),
    f"adapters of rank {ADAPTER_RANK}": (ADAPTER_RANK, False),
}
ALL = 100_000_000


def main() -> None:
    """Train in each way; write the table after each."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=DENSE["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-tokens", type=int, default=1 << 16)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    raw = DENSE | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as directory:
        layouts = write_models(Path(directory), raw)
    with together(args.device) as processes:
        count = processes.count
        command = f"torchrun --nproc-per-node {count}{COMMAND.removeprefix('python')}"
        result = provenance(COMMAND if count == 1 else command, args.device, args.commit) | {
            "parameters": [layouts["gac"].parameters, layouts["dense"].parameters],
            "batch_tokens": args.batch_tokens,
            "layers": args.layers,
            "steps": args.steps,
            "processes": count,
            "rows": {},
        }
        for name in args.ways:
            found = _measured(layouts, raw, WAYS[name], args, processes)
            result["rows"][name] = found
            if processes.is_first:
                print(name, found, flush=True)
                file = "healing_eight_billion" + (f"_{count}" if count > 1 else "")
                save(args.out / file, result, page(result))
        if processes.is_first:
            print(page(result))


def _measured(
    layouts: Mapping[str, ModelLayout],
    raw: Mapping[str, Any],
    way: tuple[int | None, bool],
    args: argparse.Namespace,
    processes: Processes,
) -> dict[str, Any]:
    rank, averages_in_host_memory = way
    device, on_gpu = processes.device, processes.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    teacher = Teacher(layouts["dense"], _random(layouts["dense"], device), processes)
    student = Student(layouts["gac"], _random(layouts["gac"], device), processes, rank)
    processes.share_out_rest(student.rest, student.layers, teacher.layers)
    distillation = Distillation(
        student=Model(_reference(layouts["gac"], raw, device), student),
        teacher=Model(_reference(layouts["dense"], raw, device), teacher),
        rest=student.rest,
        processes=processes,
        temperature=1.0,
        hidden_weight=0.0,
        mixed=on_gpu,
    )
    batch = args.batch_tokens // LENGTH
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(raw["vocab_size"], (batch * args.steps, LENGTH), generator=generator)
    steps = Schedule(len(tokens), batch, args.steps, learning_rate=1e-5)
    healing = Healing(
        distillation,
        student,
        tokens,
        tokens[:16],
        steps,
        Path("unused"),
        "",
        averages_in_host_memory,
    )
    score = Score(0.0, 0.0)
    guard, taken = Guard(score, 0.0, best=score), []
    with deterministic(device):
        for step in range(args.steps):
            begun = time.monotonic()
            finite = healing.step(step, guard)
            if on_gpu:
                torch.cuda.synchronize()
            taken.append(time.monotonic() - begun)
            if processes.is_first:
                print(f"step {step}: {taken[-1]:.2f} s", flush=True)
            assert finite
        begun = time.monotonic()
        found, _ = distillation.score(tokens[:16])
    needed = memory(layouts["gac"], layouts["dense"], (2, 2), LENGTH, rank, processes.count)
    if averages_in_host_memory:
        needed = needed.with_averages_in_host_memory
    return {
        "seconds": sorted(taken)[len(taken) // 2],
        "measuring": (time.monotonic() - begun) / (16 * LENGTH),
        "divergence": found.divergence,
        "gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None,
        "expected_gb": needed.total / 1e9,
    }


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


def _reference(layout: ModelLayout, raw: Mapping[str, Any], device: torch.device) -> Reference:
    config = HfConfig.model_validate(dict(raw))
    return Reference(
        layout=layout,
        inv_freq=inverse_frequencies(config.rope, layout.head_dim).to(device),
        eps=config.rms_norm_eps,
        window=None,
        dtype=torch.float32,
        device=device,
    )


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    student, teacher = result["parameters"]
    rows = []
    for name, found in result["rows"].items():
        speed = result["batch_tokens"] / found["seconds"]
        gpu = "-" if found["gpu_gb"] is None else f"{found['gpu_gb']:.1f}"
        rows.append(
            (
                name,
                f"{found['seconds']:.2f}",
                f"{speed:,.0f}",
                gpu,
                f"{found['expected_gb']:.1f}",
                f"{ALL / speed / 3600:.1f}",
            )
        )
    columns = (
        "trained",
        "seconds a step",
        "tokens a second",
        "GB of the GPU",
        "GB expected",
        f"hours for {ALL // 10**6} M tokens, predicted",
    )
    gpus = "one GPU" if result["processes"] == 1 else f"{result['processes']} GPUs (FSDP2)"
    lines = [
        f"# Healing a model of Llama-3-8B's shape on {gpus}",
        "",
        f"Random weights in bf16: a student of {student:,} parameters ({PARAM_RATIO} of the "
        f"dense ones, KV {KV_RATIO}) beside its teacher of {teacher:,}, {result['layers']} layers.",
        f"The median of {result['steps']} steps of {result['batch_tokens']:,} tokens in sequences "
        f"of {LENGTH}; the memory of each GPU. Measuring held-out text and saving come on top.",
        f"{origin(result)}.",
        "",
        *table(columns, rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
