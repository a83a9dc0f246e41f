"""Makes the pages, pictures and index of all results: NAME.md and NAME.svg of each NAME.json.

python -m benchmarks.results
"""

import argparse
from pathlib import Path

from benchmarks.common.result import Result
from benchmarks.results.page import index, page

FOLDER = Path(__file__).parent


def main() -> None:
    """Write everything that is made of the JSON files."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    results = read_results()
    for name, result in results.items():
        (FOLDER / f"{name}.md").write_text(page(name, result))
        if result.chart:
            from benchmarks.results.chart import svg

            (FOLDER / f"{name}.svg").write_text(svg(result, result.chart))
    (FOLDER / "README.md").write_text(index(results))


def read_results() -> dict[str, Result]:
    """The results of this folder by name, in order."""
    paths = sorted(FOLDER.glob("*.json"))
    return {path.stem: Result.model_validate_json(path.read_text()) for path in paths}


if __name__ == "__main__":
    main()
