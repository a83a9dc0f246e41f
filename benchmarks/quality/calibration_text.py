"""What calibrating on other text than the model's own costs: the demo model, on code and on prose.

python -m benchmarks.quality.calibration_text OUT      # calibration_text.json and .md

The demo model writes Python. Its own text is the one that `vllm-gac compress` takes where none is
given; for it, these pages are what that text is for a model of prose.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac import demo
from vllm_gac.steps.compress import compress
from vllm_gac.steps.compress_request import CompressRequest
from vllm_gac.steps.evaluate import evaluate

ROOT = Path(__file__).parents[2]
WINDOW, HELD_OUT_TOKENS = 512, 1 << 15
COMMAND = "python -m benchmarks.quality.calibration_text OUT"


def main() -> None:
    """Compress on each text by the same plan; write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--max-tokens", type=int, default=1 << 14, help="to calibrate on (16384)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prose = sorted((ROOT / "docs").glob("*.md")) + sorted(ROOT.glob("*.md"))
    texts = {"its own, which is built in": [demo.CALIBRATION], "pages of this project": prose}
    found = {"none: dense": _perplexity(demo.MODEL, args.device)}
    for name, files in texts.items():
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory, "out")
            compress(
                demo.MODEL,
                out,
                demo.PLAN,
                CompressRequest(max_tokens=args.max_tokens),
                calibration=files,
                device=args.device,
            )
            found[name] = _perplexity(out, args.device)
    result = {
        **provenance(COMMAND, args.device, args.commit),
        "max_tokens": args.max_tokens,
        "held_out_tokens": HELD_OUT_TOKENS,
        "perplexity": found,
    }
    text = page(result)
    save(args.out / "calibration_text", result, text)
    print(text)


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    found: dict[str, float] = result["perplexity"]
    dense = next(iter(found.values()))
    rows = [
        (name, f"{value:.4f}", f"{100 * (value / dense - 1):+.2f} %")
        for name, value in found.items()
    ]
    lines = [
        "# What calibrating on other text costs",
        "",
        f"The demo model, which writes Python, compressed by its shipped plan on "
        f"{result['max_tokens']:,} tokens of",
        f"each text. Perplexity of {result['held_out_tokens']:,} tokens of held-out Python, by the "
        "fp32 reference.",
        f"{origin(result)}.",
        "",
        *table(("calibrated on", "perplexity", "against dense"), rows),
    ]
    return "\n".join(lines) + "\n"


def _perplexity(model: Path, device: str) -> float:
    value, _ = evaluate(
        model,
        [demo.HELD_OUT],
        sequence_length=WINDOW,
        max_tokens=HELD_OUT_TOKENS,
        device=device,
    )
    return value


if __name__ == "__main__":
    main()
