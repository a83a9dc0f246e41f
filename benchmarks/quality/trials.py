"""Compress the demo model to given layers and measure its perplexity, several at once."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from vllm_gac import demo
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.compression.calibrate import DEFAULT_PROBE_TOKENS, calibrate
from vllm_gac.compression.statistics_file import check_stats
from vllm_gac.layout.dims import LayerLayout
from vllm_gac.layout.schema import LayerSection
from vllm_gac.planning.losses import MeasuredLosses, read_losses
from vllm_gac.planning.plan_file import dense_plan
from vllm_gac.steps.compress import compress
from vllm_gac.steps.evaluate import evaluate
from vllm_gac.steps.inspect import aligned_dims

SEEDS = 3
WINDOW, HELD_OUT_TOKENS = 1024, 1 << 16


@dataclass(frozen=True)
class Calibrated:
    """The demo model with statistics of one part of its calibration text."""

    model: Checkpoint
    stats: Path
    losses: MeasuredLosses


@dataclass(frozen=True)
class Trial:
    """Layers to compress to with the statistics `stats`, and a name for the result.

    `options` are more arguments of `compress`, e.g. refit.
    """

    name: tuple[Any, ...]
    layers: Sequence[LayerLayout]
    stats: Path
    options: Mapping[str, Any] = field(default_factory=dict)


def calibrations(
    directory: Path, device: str, probe_tokens: int = DEFAULT_PROBE_TOKENS
) -> list[Calibrated]:
    """Calibrate once for each seed, on parts of the text that do not overlap."""
    return [calibrated(directory, seed, device, probe_tokens) for seed in range(SEEDS)]


def calibrated(
    directory: Path, seed: int, device: str, probe_tokens: int = DEFAULT_PROBE_TOKENS
) -> Calibrated:
    """Calibrate on part `seed` of the text, unless `directory` has its statistics."""
    model = open_checkpoint(demo.MODEL)
    blocks = demo.CALIBRATION.read_text(encoding="utf-8").split("\n\n\n")
    text, stats = directory / f"text-{seed}.txt", directory / f"stats-{seed}.safetensors"
    text.write_text("\n\n\n".join(blocks[seed::SEEDS]), encoding="utf-8")
    if not stats.exists():
        calibrate(
            demo.MODEL, [text], stats, probe_tokens=probe_tokens, device=device, progress=False
        )
    metadata = check_stats(stats, model.layout, model.config_sha256)
    return Calibrated(model, stats, read_losses(stats, model.layout, metadata))


def dense_perplexity(device: str) -> float:
    """The perplexity of the dense model."""
    return _perplexity(demo.MODEL, device)


def measured(
    trials: Sequence[Trial],
    device: str,
    on_each: Callable[[tuple[Any, ...], dict[str, Any]], object] = lambda name, values: None,
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Perplexity, parameters, cached numbers and share of aligned dims, by name of the trial.

    `on_each` is called with the name and the values of each trial as soon as it is measured.
    """
    found = {}
    with pool_of_workers() as pool:
        model = open_checkpoint(demo.MODEL)
        tasks = [
            (trial.name, _plan(model, trial.layers), trial.stats, device, trial.options)
            for trial in trials
        ]
        for name, values in pool.imap(_measure, tasks):
            found[name] = values
            on_each(name, values)
    return found


def pool_of_workers() -> Pool:
    """A process for every other core, 8 at most; they share a GPU."""
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    return multiprocessing.get_context("spawn").Pool(workers)


def _measure(
    task: tuple[tuple[Any, ...], Mapping[str, Any], Path, str, Mapping[str, Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name, planned, stats, device, options = task
    with tempfile.TemporaryDirectory() as directory:
        plan, out = Path(directory) / "plan.json", Path(directory) / "out"
        plan.write_text(json.dumps(planned))
        layout = compress(
            demo.MODEL, out, plan=plan, stats=stats, device=device, progress=False, **options
        )
        value = _perplexity(out, device)
    aligned, dims = aligned_dims(layout)
    return name, {
        "perplexity": value,
        "parameters": layout.parameters,
        "kv_elements": layout.kv_elements,
        "aligned": aligned / dims,
    }


def _perplexity(directory: Path, device: str) -> float:
    value, _ = evaluate(
        directory,
        [demo.HELD_OUT],
        sequence_length=WINDOW,
        max_tokens=HELD_OUT_TOKENS,
        device=device,
    )
    return value


def _plan(model: Checkpoint, layers: Sequence[LayerLayout]) -> Mapping[str, Any]:
    """A plan.json of `layers` of any size; the table compares the size with the budget."""
    layout = replace(model.layout, layers=tuple(layers))
    base = dense_plan(model).model_dump(mode="json")
    return base | {
        "methods": ["heads", "prune", "lowrank"],
        "parameters": _all(layout.parameters),
        "kv_elements": _all(layout.kv_elements),
        "layers": [
            LayerSection.model_validate(layer.section()).model_dump(mode="json") for layer in layers
        ],
    }


def _all(count: int) -> dict[str, int]:
    return {"dense": count, "allowed": count, "used": count}
