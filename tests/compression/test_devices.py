"""The chosen device, the memory that is announced, and that a GPU measures the same as a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.llama3_8b import DENSE
from tests.support import dense_models
from tests.support.command import error
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.devices import free_memory, home_of, prepare_device
from vllm_gac.compression.effort import Work
from vllm_gac.compression.measured import Measured
from vllm_gac.compression.statistics_file import open_statistics
from vllm_gac.layout.dims import layout_of
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest


def test_the_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert prepare_device(None) == device
        assert prepare_device("cpu") == "cpu"


def test_a_gpu_is_asked_for_deterministic_products_before_its_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # PyTorch looks once, so healing after compressing would fail if healing alone asked.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    prepare_device("cpu")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare_device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_out_of_memory_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")
    function = "vllm_gac.steps.evaluate.perplexity.evaluate"
    monkeypatch.setattr(function, Mock(side_effect=full))
    dense = dense_models.write(tmp_path / "dense", dense_models.config())
    text = dense_models.write_text(tmp_path / "text.txt")
    said = error(capsys, "evaluate", dense, "--text", text, "--device", "cpu")
    assert said.startswith("the GPU's memory is full (CUDA out of memory); free some of it, give")


@pytest.mark.slow
def test_the_memory_that_is_announced_is_taken(tmp_path: Path) -> None:
    (said,), printed = _calibrated(tmp_path, "cpu", r"takes about ([\d.]+) GB of memory")
    # One digit after the point is said.
    assert int(printed) * 1024 / 1e9 == pytest.approx(said, rel=0.1, abs=0.05)


@pytest.mark.gpu
def test_the_memory_of_a_gpu_that_is_announced_is_enough(tmp_path: Path) -> None:
    numbers, _ = _calibrated(tmp_path, "cuda", r"(?:about|took) ([\d.]+) GB of the GPU's memory")
    said, taken = numbers
    assert 0.6 * said - 0.1 <= taken <= said + 0.1


def _calibrated(directory: Path, device: str, pattern: str) -> tuple[list[float], str]:
    """The numbers in what calibrating the demo says, and the kB that its process took at most."""
    code = (
        "import logging, vllm_gac; logging.basicConfig(level='INFO')\n"
        "request = vllm_gac.CalibrateRequest(max_tokens=16384)\n"
        f"vllm_gac.calibrate({str(demo.MODEL)!r}, [{str(demo.CALIBRATION)!r}], "
        f"{str(directory / 'stats')!r}, request, device={device!r}, progress=False)\n"
        # Not ru_maxrss, which begins with what the test's own process has.
        "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [float(number) for number in re.findall(pattern, done.stderr)], done.stdout


def test_hidden_states_stay_on_a_gpu_that_has_room_beside_the_rest() -> None:
    said = {"tokens": 1 << 18, "sequence_length": 512, "probe_tokens": 1 << 14, "value_group": 1}
    kept = {"methods": "heads", "covariances": "self_attn.q_proj,mlp.down_proj"}
    measured = Measured.of({key: str(value) for key, value in (said | kept).items()})
    work = Work(layout_of(DENSE), measured, weight_bytes=16_000_000_000, file_bytes=0)
    needed = work.resident_bytes
    assert needed > 16_000_000_000 + max(work.passes[0])
    assert work.home("cuda:1", 2 * needed) == "cuda:1"
    assert work.home("cuda:1", needed) == "cpu"
    assert work.home("cpu", free_memory("cpu")) == "cpu"


def test_hidden_states_of_other_steps_take_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, cpu = torch.device("cuda:1"), torch.device("cpu")
    assert home_of(100, cpu) == cpu
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (400, 800)}[device])
    assert home_of(100, gpu) == gpu
    assert home_of(101, gpu) == cpu


@pytest.mark.gpu
def test_a_gpu_measures_what_a_cpu_does(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        calibrate(
            demo.MODEL,
            [demo.CALIBRATION],
            tmp_path / device,
            CalibrateRequest(max_tokens=2048),
            device=device,
            progress=False,
        )
    dense = open_checkpoint(demo.MODEL)
    measured = [open_statistics(tmp_path / device, dense) for device in ("cpu", "cuda")]
    for index in range(len(dense.layout.layers)):
        on_cpu, on_gpu = (statistics.layer(index, "cpu") for statistics in measured)
        for name, expected in on_cpu.items():
            difference = (on_gpu[name] - expected).norm() / expected.norm()
            print(f"layers.{index}.{name}: relative difference {difference:.1e}")
            assert difference < 1e-4
    on_cpu, on_gpu = (load_file(tmp_path / device) for device in ("cpu", "cuda"))
    for name, expected in on_cpu.items():
        if ".errors." in name or name.endswith("probes"):
            assert (on_gpu[name] - expected).norm() < 1e-2 * expected.norm(), name
