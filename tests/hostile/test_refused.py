"""Every hostile directory is refused in one sentence, at little cost, and no code in it runs.

`vllm-gac verify` refuses it, and so do the checks of `vllm serve` before it uses a GPU: the config
parser, the preflight, and the loader if the fault shows only in a value.
"""

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.config.load import LoadConfig

from tests.checkpoint.pickles.bombs import Bomb
from tests.hostile import bombs, configs, indexes, names, other_tools, shards, tensors, texts
from tests.hostile.case import Case
from tests.serving.stubs import ModelConfigStub
from tests.support.command import without_bars
from vllm_gac.cli import main
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.parser import config_to_serve
from vllm_gac.serving.loading.loader import GacModelLoader
from vllm_gac.serving.loading.preflight import open_to_serve, preflight

CASES: dict[str, Case] = {
    **texts.CASES,
    **configs.CASES,
    **indexes.CASES,
    **shards.CASES,
    **tensors.CASES,
    **other_tools.CASES,
    **names.CASES,
    **bombs.CASES,
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, marker = tmp_path / "model", tmp_path / "marker"
    CASES[case].write(directory)
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        if not (directory / name).exists():
            (directory / name).write_bytes(pickle.dumps(Bomb(marker)))
    for name in ("modeling_llama.py", "configuration_llama.py", "sitecustomize.py"):
        (directory / name).write_text(f"open({str(marker)!r}, 'w')\n")

    with bounded():
        assert main(["verify", str(directory)]) == 1
    out, err = capsys.readouterr()
    assert without_bars(err) == ""
    check(out.splitlines(), case)

    with bounded(), pytest.raises(CheckpointError) as refusal:
        serve(directory)
    check([str(refusal.value)], case)
    assert not marker.exists(), "code from the directory ran"


def check(lines: list[str], case: str) -> None:
    """One line has the text of the case. All lines are printable, and none is a traceback."""
    assert lines
    for line in lines:
        assert "Traceback" not in line
        assert len(line.encode()) < 2048
        assert line.isprintable()
    says = CASES[case].says
    assert any(all(part in line for part in says) for line in lines), lines


def serve(directory: Path) -> None:
    """Load the weights as `vllm serve --load-format gac` does, without an engine."""
    config_to_serve(directory)
    _, checkpoint = open_to_serve(directory)
    preflight(directory, checkpoint.layout)
    model_config = ModelConfigStub(directory, dict(checkpoint.raw_config))
    loader = GacModelLoader(LoadConfig(load_format="gac", use_tqdm_on_load=False))
    for _ in loader.get_all_weights(model_config, torch.nn.Module()):
        pass


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes 100 MB of additional memory, or more time than 60 million additions.

    Time is measured in additions of this interpreter, so a slow machine fails no test. Each case is
    refused within the time of 20 million additions. Without bounds, the bombs took that of 160
    million.
    """
    a_million = 10 * time_of_additions(100_000)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the memory
    before, start = peak_memory(), time.thread_time()
    yield
    assert time.thread_time() - start < 60 * a_million
    assert peak_memory() - before < 100 << 20


def time_of_additions(number: int) -> float:
    """The CPU time in seconds that this number of additions takes in Python."""
    start, total = time.thread_time(), 0
    for i in range(number):
        total += i
    return time.thread_time() - start


def peak_memory() -> int:
    """The peak of the memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak) << 10


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 80
