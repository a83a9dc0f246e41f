"""Gac models run in breakable CUDA graphs and are not compiled, unless the user decides."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.config.vllm import OptimizationLevel

from vllm_gac.serving.config import cuda_graphs

SWITCH = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def requested(mode: object = None, eager: bool = False, level: int = 2, **graphs: object) -> Any:
    graphs = {
        "cudagraph_mode": None,
        "cudagraph_capture_sizes": None,
        "max_cudagraph_capture_size": None,
    } | graphs
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode, **graphs),
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        speculative_config=None,
        optimization_level=OptimizationLevel(level),
    )


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(
        cuda_graphs, "break_graphs_at_attention", lambda: None
    )  # leave this process alone
    monkeypatch.setattr(cuda_graphs, "_switched_on", False)
    monkeypatch.setenv(SWITCH, "")  # so that it is restored after the test
    monkeypatch.delenv(SWITCH)


@pytest.mark.parametrize(
    ("graphs", "sizes"), [({}, [640, 768, 896, 1024]), ({"max_cudagraph_capture_size": 64}, None)]
)
def test_a_model_is_captured_in_the_users_sizes_or_ours_and_not_compiled(
    graphs: dict[str, int], sizes: list[int] | None
) -> None:
    config = requested(**graphs)
    cuda_graphs.choose_cuda_graphs(config)
    assert os.environ[SWITCH] == "1"
    chosen = config.compilation_config.cudagraph_capture_sizes
    assert chosen is sizes is None or chosen[-4:] == sizes
    config.compilation_config.mode = CompilationMode.NONE  # as vLLM derives from the switch
    cuda_graphs.choose_cuda_graphs(config)  # of a copy; it does not decide again
    assert os.environ[SWITCH] == "1"


@pytest.mark.parametrize("config", [requested(mode=3), requested(eager=True), requested(level=0)])
def test_user_compilation_mode_is_kept(config: Any) -> None:
    cuda_graphs.choose_cuda_graphs(config)
    assert SWITCH not in os.environ


def test_user_switch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    cuda_graphs.choose_cuda_graphs(requested())
    assert os.environ[SWITCH] == "0"


def test_an_engine_started_later_decides_anew() -> None:
    cuda_graphs.choose_cuda_graphs(requested())
    again = requested()
    cuda_graphs.choose_cuda_graphs(again)
    assert os.environ[SWITCH] == "1"
    assert again.compilation_config.cudagraph_capture_sizes is not None
    # vLLM lets a switch that is on win over the mode.
    cuda_graphs.choose_cuda_graphs(requested(mode=CompilationMode.VLLM_COMPILE))
    assert SWITCH not in os.environ
    cuda_graphs.choose_cuda_graphs(requested())
    os.environ[SWITCH] = "0"  # the user decides in the meantime
    cuda_graphs.choose_cuda_graphs(requested())
    assert os.environ[SWITCH] == "0"


def test_no_cuda_graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    cuda_graphs.choose_cuda_graphs(requested())
    assert SWITCH not in os.environ


# Runs in a process of its own, because the order of imports matters. It imitates a GPU's capture.
IN_A_WORKER = """
import os, sys
from types import SimpleNamespace
import torch
if sys.argv[1] == "imported":
    import vllm.model_executor.layers.attention.attention
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
from vllm_gac.serving.config.cuda_graphs import break_graphs_at_attention

break_graphs_at_attention()
from vllm.compilation import breakable_cudagraph
from vllm.model_executor.layers.attention import attention

break_graphs_at_attention()
calls = []
impl = SimpleNamespace(forward=lambda *args, **named: calls.append(named["output"]))
attention.get_attention_context = lambda name: (None, SimpleNamespace(impl=impl), None, None)
breakable_cudagraph._weak_ref_capture_arg = lambda x: x

class Capture(breakable_cudagraph.BreakableCUDAGraphCapture):
    def _begin_segment(self):
        self._capturing = True
    def _end_segment(self):
        self._capturing = False

x = torch.zeros(1)
with Capture() as capture:
    torch.ops.vllm.unified_attention_with_output(x, x, x, x, "layer")
capture.replay()
print(capture.num_eager_breaks, "break, met", len(calls), "times")
"""


@pytest.mark.slow
@pytest.mark.parametrize("imported", ["imported", "not yet imported"])
def test_graphs_break_at_attention_whenever_it_was_imported(imported: str) -> None:
    command = [sys.executable, "-c", IN_A_WORKER, imported]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    told = ran.stdout.splitlines()[-1:]
    assert told == ["1 break, met 2 times"], ran.stdout + ran.stderr  # when captured and replayed
