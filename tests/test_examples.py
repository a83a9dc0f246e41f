"""The recipes of examples/ run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.importers.low_rank_models import SOME, write_low_rank
from tests.steps.heal.models import FAST, flags, write_all
from tests.support.dense_models import write_text, write_tokenizer
from vllm_gac import demo

EXAMPLES = Path(__file__).parents[1] / "examples"


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def said(script: str, *arguments: object) -> str:
    command = [EXAMPLES / script, *map(str, arguments)]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_the_page_has_every_recipe() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in page for path in EXAMPLES.glob("*.sh"))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["more_room.sh", "faster_in_fp8.sh"])
def test_the_demo_is_compressed(script: str, tmp_path: Path) -> None:
    text, held_out = tmp_path / "text.txt", tmp_path / "held-out.txt"
    text.write_text(demo.CALIBRATION.read_text()[:12_000])
    held_out.write_text(demo.HELD_OUT.read_text()[:40_000])
    printed = said(script, demo.MODEL, text, held_out, tmp_path / "out")
    assert " times " in printed.splitlines()[-2]


def test_what_another_tool_wrote_is_padded_and_answers_the_same(tmp_path: Path) -> None:
    source, _ = write_low_rank(tmp_path / "source", "svd-llm", SOME)
    write_tokenizer(source / "tokenizer.json", 128)
    text = write_text(tmp_path / "text.txt", 3000)
    assert "\n1.0000 times" in said("other_tool.sh", source, text, tmp_path / "out")


def test_a_compressed_model_is_healed(tmp_path: Path) -> None:
    student, teacher, text = write_all(tmp_path)
    options = (*flags(FAST), "--device", "cpu")
    printed = said("heal.sh", student, teacher, text, text, tmp_path / "out", *options)
    before, after = (float(line.split()[0]) for line in printed.splitlines() if " times " in line)
    assert after < before
