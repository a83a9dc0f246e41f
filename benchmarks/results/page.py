"""The page of a result, and the index of all."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.common.result import RANDOM_WEIGHTS, Cell, Result

_INDEX = """# Results

Each is a JSON file of one command; `python -m benchmarks.results` makes the pages of them. What was
tried and is no longer measured has a line in [decisions](../../docs/decisions.md).
"""
_OF_RANDOM_WEIGHTS = "Random weights: this tells speed and room, not quality."


def page(name: str, result: Result) -> str:
    """The Markdown page of a result; its picture, if it has one, is NAME.svg."""
    picture = f"![{result.chart.axis}]({name}.svg)" if result.chart else ""
    random = result.weights == RANDOM_WEIGHTS
    notes = [*result.notes, *(f"{what} failed: {why}" for what, why in result.failed.items())]
    versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
    return "\n\n".join(
        part
        for part in (
            f"# {result.title}",
            _OF_RANDOM_WEIGHTS if random else f"Model: {result.weights}.",
            f"**{result.question}** {result.answer}",
            picture,
            *(table(result, keys) for keys in result.tables or [list(result.headers)]),
            "\n".join(f"- {note}" for note in notes),
            f"`{result.command}`",
            f"{result.gpu}, {result.date}, commit {result.commit}, {versions}.\n",
        )
        if part
    )


def table(result: Result, keys: Sequence[str]) -> str:
    """A Markdown table of a result, with the ratios of the columns that are compared."""
    lines = [_line(result.headers[key] for key in keys), _line("---" for _ in keys)]
    for number, row in enumerate(result.rows):
        cells = []
        for key in keys:
            ratio = result.ratio(row, key) if number and key in result.compared else None
            suffix = "" if ratio is None else f" ({ratio:.2f}x)"
            cells.append(_text(result.cell(row, key)) + suffix)
        lines.append(_line(cells))
    return "\n".join(lines)


def index(results: Mapping[str, Result]) -> str:
    """The page of all results, of trained models first."""
    of_random = {n: r for n, r in results.items() if r.weights == RANDOM_WEIGHTS}
    groups = {
        "Trained models": {n: r for n, r in results.items() if n not in of_random},
        "Random weights: speed and room, not quality": of_random,
    }
    lines = [_INDEX]
    for title, group in groups.items():
        if group:
            lines.append(f"## {title}\n")
            lines += [f"- [{r.title}]({name}.md), {r.gpu}. {r.answer}" for name, r in group.items()]
            lines.append("")
    return "\n".join(lines)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, tuple):
        return " to ".join(map(_text, cell))
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def _line(cells: Iterable[str] | Sequence[str]) -> str:
    # A bar or a line break would end the cell.
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
