"""Draws the README's two diagrams: python docs/draw.py"""

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
INK, FAINT, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
KEY, VALUE, WEIGHT, WASTE = "#2f7ed8", "#f0883e", "#4c9f70", "#e4e7eb"
FONT = "font-family='Helvetica,Arial,sans-serif'"


def main() -> None:
    """Write pipeline.svg and cache.svg beside this file."""
    (HERE / "pipeline.svg").write_text(_pipeline())
    (HERE / "cache.svg").write_text(_cache())


def _svg(width: int, height: int, parts: list[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' {FONT}>"
        f"<rect width='{width}' height='{height}' fill='{PAPER}'/>{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, text: str, size: int = 13, **style: str) -> str:
    style = {"fill": INK, "text-anchor": "start"} | {
        k.replace("_", "-"): v for k, v in style.items()
    }
    attributes = " ".join(f"{name}='{value}'" for name, value in style.items())
    return f"<text x='{x}' y='{y}' font-size='{size}' {attributes}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, fill: str, radius: int = 3) -> str:
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='{radius}' fill='{fill}'/>"


def _pipeline() -> str:
    """The way of the data: each step reads one file and writes the next."""
    steps = [
        ("calibrate", "text, layer by layer", "stats.safetensors", WEIGHT),
        ("plan", "aligned dims, in budget", "plan.json", WEIGHT),
        ("compress", "heads, MLPs, low rank", "model directory", WEIGHT),
        ("vllm serve", "--load-format gac", "OpenAI API", KEY),
    ]
    parts = []
    for i, (name, what, product, colour) in enumerate(steps):
        x = 20 + i * 215
        parts += [
            _box(x, 30, 165, 58, colour, 8),
            _text(x + 82, 55, name, 16, fill=PAPER, text_anchor="middle", font_weight="bold"),
            _text(x + 82, 75, what, 12, fill=PAPER, text_anchor="middle"),
            _text(x + 82, 116, product, 12, fill=INK, text_anchor="middle"),
        ]
        if i < len(steps) - 1:
            parts.append(
                f"<path d='M{x + 170} 59 h32 m-8 -6 l8 6 l-8 6' fill='none' stroke='{INK}' "
                "stroke-width='2'/>"
            )
    return _svg(850, 135, parts)


def _cache() -> str:
    """What one token costs in the KV cache of four layers, drawn to scale."""
    dense = [(8, 128, 8, 128)] * 4
    layers = [(8, 96, 8, 64), (8, 64, 4, 128), (4, 128, 4, 128), (8, 112, 8, 96)]
    notes = [
        "rotary keys, 96 of 128 dims",
        "latent keys, rebuilt in attention; 2 value heads made one",
        "2 key and 2 value heads made one",
        "rotary keys, 112 of 128 dims",
    ]
    scale = 0.15
    parts = [_text(20, 28, "KV cache of one token, per layer (to scale)", 15, font_weight="bold")]
    for row, (title, shapes) in enumerate((("dense", dense), ("compressed", layers))):
        top = 62 + row * 142
        parts.append(_text(20, top - 10, title, 13, fill=FAINT))
        for i, (key_heads, key_size, value_heads, value_size) in enumerate(shapes):
            y = top + i * 28
            keys, values = key_heads * key_size * scale, value_heads * value_size * scale
            full = 2 * 8 * 128 * scale
            parts += [
                _box(20, y, full, 20, WASTE),
                _box(20, y, keys, 20, KEY),
                _box(20 + keys, y, values, 20, VALUE),
                _text(28, y + 14, f"{key_heads} x {key_size}", 11, fill=PAPER),
                _text(28 + keys, y + 14, f"{value_heads} x {value_size}", 11, fill=PAPER),
            ]
            if row:
                parts.append(_text(28 + full, y + 14, notes[i], 12))
    saved = 1 - sum(a * b + c * d for a, b, c, d in layers) / sum(
        a * b + c * d for a, b, c, d in dense
    )
    parts += [
        _box(20, 334, 14, 14, KEY),
        _text(40, 346, "keys (heads x size)", 12),
        _box(180, 334, 14, 14, VALUE),
        _text(200, 346, "values", 12),
        _box(270, 334, 14, 14, WASTE),
        _text(290, 346, f"room for more tokens: {saved:.0%}, nothing padded", 12),
    ]
    return _svg(720, 362, parts)


if __name__ == "__main__":
    main()
