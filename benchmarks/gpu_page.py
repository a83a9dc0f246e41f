"""What was measured on this GPU, row by row, as JSON and as a page."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import markdown


def write_page(
    out: Path | None, command: str, title: str, about: str, rows: Sequence[dict[str, Any]]
) -> None:
    """Write OUT.json and OUT.md, with the GPU, the date and the command; nothing without `out`."""
    if out is None:
        return
    result = {
        "command": f"python -m {command}",
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "rows": rows,
    }
    facts = f"{result['gpu']}, {result['date']}, torch {result['torch']}, `{result['command']}`."
    page = [f"# {title}", "", facts, about, "", *markdown(rows), ""]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(page))
