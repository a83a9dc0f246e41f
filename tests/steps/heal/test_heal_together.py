"""Two processes that torchrun has started heal a model as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.steps.heal.killed_heal import KILLED_AT
from tests.steps.heal.models import FAST, flags, write_all, write_near
from tests.support.hub import files_of
from tests.support.stored_models import stored_tensors
from vllm_gac.steps.heal.heal import heal
from vllm_gac.steps.heal.request import HealRequest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def healed_by_two(
    directory: Path, out: str, *more: object, killed: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    code = ("-m", "tests.steps.heal.killed_heal" if killed else "vllm_gac")
    texts = ("--teacher", directory / "teacher", "--text", directory / "text.txt")
    argv = [*TORCHRUN, *code, "heal", directory / "student", *texts, "--out", directory / out]
    return subprocess.run(
        [
            str(item)
            for item in (*argv, "--device", "cpu", "--quiet", *flags(FAST | options), *more)
        ],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", KILLED_AT: str(killed or ""), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("train", ["full", "lora"])
def test_two_processes_heal_as_one_does_and_resume(tmp_path: Path, train: Any) -> None:
    student, teacher, text = write_all(tmp_path)
    request = HealRequest(train=train, **FAST)
    one = heal(student, teacher, [text], tmp_path / "one", request, progress=False)
    ran = healed_by_two(tmp_path, "two", "--json", train=train)
    assert ran.returncode == 0, ran.stderr[:3000]
    (line,) = ran.stdout.splitlines()  # only one of them prints
    two = json.loads(line)
    for ours, theirs in zip(two["curve"], one.curve, strict=True):
        assert ours == pytest.approx(list(theirs), rel=1e-3)
    together, alone = stored_tensors(tmp_path / "two"), stored_tensors(tmp_path / "one")
    before = stored_tensors(student)
    assert together.keys() == alone.keys()
    for name, tensor in alone.items():
        moved = (tensor - before[name]).norm()
        assert (together[name] - tensor).norm() <= 0.02 * moved, name

    ran = healed_by_two(tmp_path, "killed", train=train, killed=3)
    assert ran.returncode != 0
    assert (tmp_path / "killed.partial" / "healing.safetensors").exists()
    ran = healed_by_two(tmp_path, "killed", "--resume", train=train)
    assert ran.returncode == 0, ran.stderr[:3000]
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "two")
    assert not (tmp_path / "killed.partial").exists()


def test_an_error_is_printed_by_one_process(tmp_path: Path) -> None:
    student, teacher, _ = write_all(tmp_path)
    write_near(student, teacher)
    ran = healed_by_two(tmp_path, "out", batch_tokens=96)
    assert ran.returncode != 0
    (said,) = (line for line in ran.stderr.splitlines() if line.startswith("vllm-gac: "))
    assert "--batch-tokens 96" in said
    ran = healed_by_two(tmp_path, "out", learning_rate=1000, train="full")
    (said,) = (line for line in ran.stderr.splitlines() if line.startswith("vllm-gac: error"))
    assert f"{student}: " in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
