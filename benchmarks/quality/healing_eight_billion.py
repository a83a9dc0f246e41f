"""Ten steps of healing a random model of Llama-3-8B's shape: seconds and memory.

    python -m benchmarks.quality.healing_eight_billion OUT [--device cuda]

Writes healing_eight_billion.json and .md into OUT. The weights are made on the GPU, and nothing but
the result is written.
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
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.student import Student
from vllm_gac.healing.train import Healing, deterministic
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import HfConfig

COMMAND = "python -m benchmarks.quality.healing_eight_billion OUT --device cuda"
LENGTH, ADAPTER_RANK = 512, 32
ALL = 100_000_000


def main() -> None:
    """Train whole weights, then adapters; write the table after each."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=DENSE["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-tokens", type=int, default=1 << 13)
    args = parser.parse_args()
    raw = DENSE | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as directory:
        layouts = write_models(Path(directory), raw)
    result = provenance(COMMAND, args.device, args.commit) | {
        "parameters": [layouts["gac"].parameters, layouts["dense"].parameters],
        "batch_tokens": args.batch_tokens,
        "rows": {},
    }
    for name, rank in (("whole weights", None), (f"adapters of rank {ADAPTER_RANK}", ADAPTER_RANK)):
        result["rows"][name] = _measured(layouts, raw, rank, args)
        print(name, result["rows"][name], flush=True)
        save(args.out / "healing_eight_billion", result, page(result))
    print(page(result))


def _measured(
    layouts: Mapping[str, ModelLayout],
    raw: Mapping[str, Any],
    rank: int | None,
    args: argparse.Namespace,
) -> dict[str, Any]:
    device, on_gpu = torch.device(args.device), args.device.startswith("cuda")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    read = _random(layouts["dense"], device)
    teacher = {name: read(name) for name in layouts["dense"].tensors()}
    student = Student(layouts["gac"], _random(layouts["gac"], device), device, rank)
    distillation = Distillation(
        student=Model(_reference(layouts["gac"], raw, device), student.tensor),
        teacher=Model(_reference(layouts["dense"], raw, device), teacher.__getitem__),
        temperature=1.0,
        hidden_weight=0.0,
        mixed=on_gpu,
    )
    batch = args.batch_tokens // LENGTH
    tokens = torch.randint(raw["vocab_size"], (batch * args.steps, LENGTH))
    steps = Schedule(len(tokens), batch, args.steps, learning_rate=1e-5)
    healing = Healing(distillation, student, tokens, tokens[:16], steps, Path("unused"), "")
    score = Score(0.0, 0.0)
    guard, taken = Guard(score, 0.0, best=score), []
    with deterministic(device):
        for step in range(args.steps):
            begun = time.monotonic()
            finite = healing.step(step, guard)  # waits for the GPU
            taken.append(time.monotonic() - begun)
            print(f"step {step}: {taken[-1]:.2f} s", flush=True)
            assert finite
        begun = time.monotonic()
        distillation.score(tokens[:16])
    return {
        "seconds": sorted(taken)[len(taken) // 2],
        "measuring": (time.monotonic() - begun) / (16 * LENGTH),
        "gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None,
        "expected_gb": memory(layouts["gac"], layouts["dense"], (2, 2), LENGTH, rank).total / 1e9,
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
    lines = [
        "# Healing a model of Llama-3-8B's shape",
        "",
        f"Random weights in bf16: a student of {student:,} parameters ({PARAM_RATIO} of the "
        f"dense ones, KV {KV_RATIO}) beside its teacher of {teacher:,}.",
        f"The median of ten steps of {result['batch_tokens']:,} tokens in sequences of {LENGTH}. "
        "Measuring held-out text and saving come on top, at most a few hundredths.",
        f"{origin(result)}.",
        "",
        *table(columns, rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
