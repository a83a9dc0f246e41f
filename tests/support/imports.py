"""What source files import, read without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(package: str) -> dict[str, Path]:
    """Source files by their dotted names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / package).rglob("*.py")
    }


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if _is_ours(submodule) else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _is_ours(name: str) -> bool:
    """Whether the repository has a module of that dotted name."""
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
