"""Statistics of the demo model on parts of its calibration text, and processes to compress it."""

import multiprocessing
import os
from multiprocessing.pool import Pool
from pathlib import Path

from vllm_gac import demo
from vllm_gac.steps.calibrate import calibrate

SEEDS = 3


def calibrated(directory: Path, seed: int, device: str) -> Path:
    """Statistics of part `seed` of the text, unless `directory` has them.

    The parts do not overlap.
    """
    blocks = demo.CALIBRATION.read_text(encoding="utf-8").split("\n\n\n")
    text, stats = directory / f"text-{seed}.txt", directory / f"stats-{seed}.safetensors"
    text.write_text("\n\n\n".join(blocks[seed::SEEDS]), encoding="utf-8")
    if not stats.exists():
        calibrate(demo.MODEL, [text], stats, device=device, progress=False)
    return stats


def pool_of_workers() -> Pool:
    """A process for every other core, 8 at most; they share a GPU."""
    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    return multiprocessing.get_context("spawn").Pool(workers)
