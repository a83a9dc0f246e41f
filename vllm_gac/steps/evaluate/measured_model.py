"""What a compressed model loses on text that was set aside: measured, and said by the model."""

import logging
from pathlib import Path

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.compression.measured import HELD
from vllm_gac.compression.reference_model import batches
from vllm_gac.compression.statistics_file import Statistics
from vllm_gac.steps.evaluate.compare import compared
from vllm_gac.steps.measurement import Measurement

logger = logging.getLogger(__name__)

_SECTION = "\n## Measured\n"
# From so much more perplexity on, tasks have lost much.
_MUCH = 1.05


def measure_model(directory: Path, stats: Statistics | None, device: str, progress: bool) -> None:
    """Compare the compressed model in `directory` with the dense one, and write it down there.

    Args:
        directory: The model, whose config.json and card say then what was measured.
        stats: The dense model's, which it was made with; None: nothing was shrunk.
        device: The torch device to compute on.
        progress: Whether to show a progress bar on stderr.
    """
    if stats is None:
        return
    if not stats.measured.held_tokens:
        logger.warning(
            "%s: no text was set aside, so that the model's loss is not measured; calibrate again, "
            "or use 'vllm-gac evaluate --against'",
            stats.path,
        )
        return
    tokens = [*batches(stats.tokens(HELD).long())]
    model = open_checkpoint(directory)
    comparison = compared(model, stats.model, tokens, {}, device, progress)
    if comparison.ratio > _MUCH:
        logger.warning(
            "the perplexity is %.1f %% higher than the dense model's. Tasks lose far more than "
            "perplexity says: answers are long, and each token has to be right. Keep more, or heal "
            "the model, and measure it on your task",
            100 * (comparison.ratio - 1),
        )
    measurement = Measurement(
        ratio=round(comparison.ratio, 6),
        interval=comparison.interval and [round(end, 6) for end in comparison.interval],
        divergence=round(max(comparison.divergence, 0), 6),
        agreement=round(comparison.agreement, 6),
        tokens=comparison.tokens,
    )
    config = read_json(directory / "config.json")
    config["gac"]["source"]["measured"] = measurement.model_dump(mode="json")
    write_json(directory / "config.json", config)
    card = (directory / "README.md").read_text().partition(_SECTION)[0]
    said = f"On documents that were set aside of the calibration text: {measurement}."
    write_text(directory / "README.md", f"{card}{_SECTION}\n{said}\n")
