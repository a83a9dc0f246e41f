"""The page of vLLM's interfaces has all that our sources use; the check reads a tree of git."""

import shutil
from pathlib import Path

import pytest

from tests.tools.test_vllm_contract import INSTALLED, small_release
from tools.vllm_contract.__main__ import ROOT
from tools.vllm_contract.behaviours import BEHAVIOURS
from tools.vllm_contract.page import MARK, rewrite, tables
from tools.vllm_contract.sources import Release
from tools.vllm_contract.uses import Uses

PAGE = ROOT / "docs/vllm_interfaces.md"


def test_the_page_is_complete_and_says_what_our_sources_say() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(f"{MARK}\n\n")[2].splitlines()
    made = [*tables([INSTALLED])]
    assert written[0].startswith(made[0].removesuffix("."))
    assert [line for line in made[1:] if line not in written] == []
    assert [line for line in written[1:] if line not in made and "(not in " not in line] == []
    assert len(made) > len(BEHAVIOURS) + 80


@pytest.fixture
def small(tmp_path: Path) -> Release:
    return small_release(tmp_path)


def test_what_is_imported_read_overridden_and_named_is_in_the_tables(small: Release) -> None:
    lines = "\n".join(tables([small]))
    for row in (
        "| `vllm.backend`: `Backend` | `build`, `scale` | `forward` | `.` |",
        "| `vllm.config.cache`: `CacheConfig` | `dtype`, `rows` |  | `.` |",
        "| `vllm.config.cache` |  |  | `.` |",
        "| `vllm.config`: `VllmConfig` | `cache_config`, `pages` |  | `.` |",
        "| `vllm.envs` | `VLLM_SWITCH` |  | `.` |",
        "| `vllm.fast`: `split` |  |  | `.` |",
    ):
        assert row in lines


def test_what_another_release_lacks_is_marked(small: Release, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "vllm", other / "vllm")
    (other / "vllm/fast.py").write_text("")
    (other / "vllm/_version.py").write_text("__version__ = '9.9.10'")
    lines = [*tables([small, Release(other, tmp_path)])]
    assert (
        lines[0] == "Modules and quotes are those of vLLM 9.9.9, and what 9.9.10 lacks is marked."
    )
    assert [line.split(" |")[0] for line in lines if "(not in" in line] == [
        "| `vllm.fast`: `split` (not in 9.9.10)"
    ]


def test_what_is_written_by_hand_stays(small: Release, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# By hand\n\n{MARK}\n\nas it was\n")
    rewrite(page, [small])
    assert page.read_text().startswith(f"# By hand\n\n{MARK}\n\nModules and quotes")
    assert "as it was" not in page.read_text()
    page.write_text("# By hand\n")
    with pytest.raises(SystemExit, match=r"page\.md: has no line"):
        rewrite(page, [small])


def test_a_tree_of_git_which_has_no_version_is_checked_like_a_release(
    small: Release, tmp_path: Path
) -> None:
    (tmp_path / "vllm/_version.py").unlink()
    tree = Release(tmp_path, tmp_path)
    assert tree.version == "unknown"
    ours = tmp_path / "vllm_gac/ours.py"
    assert [*Uses(tree, "vllm_gac.ours", ours, "ours.py").broken()] == []
