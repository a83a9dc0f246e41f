"""Every hostile directory is refused in one sentence, soon and cheaply, and nothing in it runs.

By `vllm-gac verify`, and by the gates that `vllm serve` goes through before a GPU is touched: the
config parser, the preflight, and the loader where it takes a value to see the fault.
"""

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.load import LoadConfig

from tests.hostile import bombs, configs, indexes, names, other_tools, shards, tensors, texts
from tests.hostile.case import Case
from tests.serving.stubs import ModelConfigStub
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


class Bomb:
    """Leaves a marker file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


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
    assert err == ""
    check(out.splitlines(), case)

    with bounded(), pytest.raises(CheckpointError) as refusal:
        serve(directory)
    check([str(refusal.value)], case)
    assert not marker.exists(), "code from the directory ran"


def check(lines: list[str], case: str) -> None:
    """One of the sentences says what it must; all are printable and none is a traceback."""
    assert lines
    for line in lines:
        assert "Traceback" not in line
        assert len(line.encode()) < 2048
        assert line.isprintable()
    says = CASES[case].says
    assert any(all(part in line for part in says) for line in lines), lines


def serve(directory: Path) -> None:
    """As `vllm serve --load-format gac` gets to the weights, without an engine."""
    config_to_serve(directory)
    _, checkpoint = open_to_serve(directory)
    preflight(directory, checkpoint.layout)
    model_config = ModelConfigStub(directory, dict(checkpoint.raw_config))
    loader = GacModelLoader(LoadConfig(load_format="gac", use_tqdm_on_load=False))
    for _ in loader.get_all_weights(model_config, torch.nn.Module()):
        pass


@contextmanager
def bounded() -> Iterator[None]:
    """Fails what takes 100 MB more memory than there was, or more work than 60 million additions.

    Work is told in additions of this interpreter on this machine, so that a slow one fails nothing.
    Each case is refused within the work of 20 million; unbounded, the bombs took that of 160.
    """
    a_million = 10 * time_of_additions(100_000)
    Path("/proc/self/clear_refs").write_text("5")  # peak memory starts again from here
    before, start = peak_memory(), time.thread_time()
    yield
    assert time.thread_time() - start < 60 * a_million
    assert peak_memory() - before < 100 << 20


def time_of_additions(number: int) -> float:
    """Seconds of the CPU that so many additions take in Python."""
    start, total = time.thread_time(), 0
    for i in range(number):
        total += i
    return time.thread_time() - start


def peak_memory() -> int:
    """The most bytes that were in memory at a time."""
    status = Path("/proc/self/status").read_text()
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak) << 10


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 80
