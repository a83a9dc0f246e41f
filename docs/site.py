"""Hooks of `make docs`: which files the site has.

The site has the pages of the whole repository, each at its own place, and the other files that they
link. So a link is right in the site if it is right in the repository.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from command_line import command_line_page  # beside this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FOLDERS = ("docs", "benchmarks", "examples", "loadtest", "patches", "serving_configs")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the pages of the repository, what they link, and the command line."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    pages = [*ROOT.glob("*.md"), *(p for name in _FOLDERS for p in (ROOT / name).rglob("*.md"))]
    linked = {target for page in pages for target in _linked_files(page)}
    paths = sorted({*pages, *linked})
    kept += [
        File(
            path.relative_to(ROOT).as_posix(),
            str(ROOT),
            config.site_dir,
            config.use_directory_urls,
        )
        for path in paths
    ]
    return Files([*kept, File.generated(config, "docs/cli.md", content=command_line_page())])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders lead to their README; a folder without one is only named."""
    here = (ROOT / page.file.src_uri).parent

    def resolved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if not (here / target).is_dir():
            return link[0]
        if (here / target / "README.md").is_file():
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return text

    return _LINK.sub(resolved, markdown)


def _linked_files(page: Path) -> Iterator[Path]:
    """The files of the repository that `page` links."""
    for _, target, _ in _LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path
