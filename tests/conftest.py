"""What tests share: the compressed demo model; and `gpu` tests are skipped without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_gac import demo

# No deadline: how long an example takes depends on what else the machine does.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# How `make serve` compresses the demo model.
MAKE_SERVE = ("--plan", str(demo.PLAN), "--max-tokens", "16384")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Asked when such a test is about to run, so that runs without any never import torch here.
    if item.get_closest_marker("gpu") and not _cuda_is_available():
        pytest.skip("needs a CUDA GPU")


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def compressed_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as `make serve` compresses it, made once a session by the command itself."""
    out = tmp_path_factory.mktemp("compressed") / "demo-gac"
    command = [Path(sys.executable).parent / "vllm-gac", "compress", demo.MODEL, "--out", out]
    subprocess.run([*command, *MAKE_SERVE], check=True)
    return out
