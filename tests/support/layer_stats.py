"""The statistics of one layer of a file that a test trusts."""

from pathlib import Path

from safetensors import safe_open

from vllm_gac.compression.measured import LayerStats, Measured
from vllm_gac.compression.statistics_file import read_layer_stats


def layer_stats(stats: Path, index: int) -> LayerStats:
    """The covariances, metrics and scores of a layer, on the CPU."""
    with safe_open(stats, framework="np") as file:
        measured = Measured.of(file.metadata())
    return read_layer_stats(stats, measured, index, "cpu")
