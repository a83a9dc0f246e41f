"""What a model that was chosen by its loss says of itself: config.json, the card, a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.planning.picture import svg
from vllm_gac.steps.tries import Try
from vllm_gac.steps.tries_picture import draw_tries

PICTURE = "loss.svg"
_SECTION = "\n## Asked for, and measured\n"


def record(directory: Path, asked: float, best: Try, tries: Sequence[Try]) -> None:
    """Write into config.json, the card and a picture what was asked for, tried and measured.

    Args:
        directory: The chosen model.
        asked: The most that its perplexity may be higher by, as a share.
        best: What was measured of it, one of `tries`.
        tries: All models that were written and measured.
    """
    rows = [{key: value for key, value in asdict(one).items() if key != "layers"} for one in tries]
    config = read_json(directory / "config.json")
    chosen = rows[list(tries).index(best)]
    config["gac"]["source"]["max_loss"] = {"asked": asked, "measured": chosen, "tried": rows}
    write_json(directory / "config.json", config)
    write_text(directory / PICTURE, svg(draw_tries(asked, best, tries)))
    card = (directory / "README.md").read_text()
    table = "".join(
        f"| {row['expected_loss']:.4f} | {100 * (row['ratio'] - 1):.2f} % | "
        f"{100 * (row['low'] - 1):.2f} to {100 * (row['high'] - 1):.2f} % | {row['time']:.1%} |"
        f"{' this model |' if one is best else ' |'}\n"
        for row, one in zip(rows, tries, strict=True)
    )
    write_text(
        directory / "README.md",
        card.partition(_SECTION)[0]
        + f"{_SECTION}\nAsked for: the fastest model whose perplexity is at most {asked:.2%} "
        f"higher than the dense model's. Measured on {best.tokens:,} tokens of held-out text:\n\n"
        "| expected loss | perplexity higher by | 95 % interval | time, of dense | |\n"
        f"|---:|---:|---:|---:|---|\n{table}\n![loss against predicted time]({PICTURE})\n",
    )
