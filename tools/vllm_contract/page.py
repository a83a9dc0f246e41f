"""The tables of docs/vllm_interfaces.md, the page of the interfaces that vllm-gac uses."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.vllm_contract.behaviours import BEHAVIOURS, OVERRIDDEN
from tools.vllm_contract.sources import Release
from tools.vllm_contract.uses import uses_of

# What precedes the tables is written by hand.
MARK = "<!-- Generated from here on: python -m tools.vllm_contract RELEASE... --page THIS -->"


def rewrite(page: Path, releases: Sequence[Release]) -> None:
    """Write the tables anew, for `releases`, below the mark in `page`.

    Raises:
        SystemExit: The page has no mark.
    """
    by_hand, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise SystemExit(f"{page}: has no line {MARK!r}; the tables are written below it")
    page.write_text("\n".join([by_hand + mark, "", *tables(releases), ""]), encoding="utf-8")


def tables(releases: Sequence[Release]) -> Iterator[str]:
    """The lines of the tables: what is used, what vLLM reads of ours, how vLLM must behave."""
    release, *others = releases
    also = "".join(f", and what {other.version} lacks is marked" for other in others)
    yield f"Modules and quotes are those of vLLM {release.version}{also}."
    yield ""
    yield "## What is imported, read, called and overridden"
    yield ""
    yield "| interface | what of it | overridden | used in |"
    yield "| --- | --- | --- | --- |"
    for name, (members, overrides, files) in sorted(used(release).items()):
        folders = {str(Path(file.removeprefix("vllm_gac/")).parent) for file in files}
        module, _, own = name.rpartition(".")
        place = _named(name) if release.module(name) else _named(module, own)
        shown = f"{place}{_lacking(releases, name)}"
        cells = [shown, *map(_listed, (members, overrides, folders))]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## What vLLM reads of our classes, or calls"
    yield ""
    yield "| class of vLLM that ours extend or fill in | attributes and methods |"
    yield "| --- | --- |"
    for (module, name), attributes in OVERRIDDEN.items():
        yield f"| {_named(module, name)} | {_listed(attributes.split())} |"
    yield ""
    yield "## How vLLM must behave"
    yield ""
    yield "| where | what it says today | so that |"
    yield "| --- | --- | --- |"
    for behaviour in BEHAVIOURS:
        where = _named(behaviour.module, behaviour.name)
        quotes = " or ".join(f"`{quote.replace('|', '&#124;')}`" for quote in behaviour.quotes)
        yield f"| {where} | {quotes} | {behaviour.why} |"


def used(release: Release) -> dict[str, tuple[set[str], set[str], set[str]]]:
    """By dotted name: the attributes that we use of it, what we override, and our files."""
    found: dict[str, tuple[set[str], set[str], set[str]]] = defaultdict(
        lambda: (set(), set(), set())
    )
    for uses in uses_of(release):
        for _ in uses.broken():
            pass  # whoever asks for the page has seen them
        for name in uses.names:
            found[_defined(release, name)][2].add(uses.shown)
        for column, pairs in enumerate((uses.members, uses.overrides)):
            for owner, attribute in pairs:
                found[owner][column].add(attribute)
                found[owner][2].add(uses.shown)
    return found


def _defined(release: Release, name: str) -> str:
    """The dotted name of where an imported name is defined."""
    module, _, attribute = name.rpartition(".")
    definition = release.find(module, attribute)
    return name if definition is None or not definition.name else str(definition)


def _named(module: str, name: str = "") -> str:
    return f"`{module}`: `{name}`" if name else f"`{module}`"


def _lacking(releases: Sequence[Release], name: str) -> str:
    """Which of the releases have no such name, as a remark."""
    module, _, attribute = name.rpartition(".")
    without = [
        release.version
        for release in releases
        if release.module(name) is None and release.find(module, attribute) is None
    ]
    return f" (not in {', '.join(without)})" if without else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
