"""Pipeline stages have as many bytes of weights and cache each, unless the user decides."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.config.test_engine_options import requested
from tests.serving.models import layer
from tests.serving.stubs import VllmConfigStub
from tests.support.dense_models import config, write
from vllm_gac.serving.config import pipeline_stages
from vllm_gac.serving.config.foreign_code import ForeignCodeHook
from vllm_gac.serving.config.pipeline_stages import balanced, choose_stages

VARIABLE = "VLLM_PP_LAYER_PARTITION"


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ([1, 5, 1, 1], [2, 2]),
        ([2, 2, 2, 1, 1, 1, 3], [2, 3, 2]),
        ([9, 1, 1], [1, 1, 1]),
        ([1, 1, 9], [1, 1, 1]),
    ],
)
def test_stages_are_of_like_sizes_and_have_a_layer(sizes: list[float], layers: list[int]) -> None:
    assert balanced(sizes, len(layers)) == layers


def test_stages_have_as_many_bytes_unless_somebody_else_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two layers cache most."""
    layers = [layer(("rotary", 2, 16), (2, 16), 96)] * 2 + [layer(("rotary", 1, 8), (1, 8), 96)] * 6
    gac = {"version": 1, "softmax_scale": 0.25, "head_dim": 16, "layers": layers}
    raw = config(architectures=["GacLlamaForCausalLM"], num_hidden_layers=8, gac=gac)
    write(tmp_path / "model", raw)
    platform = SimpleNamespace(get_device_total_memory=lambda: 1 << 30)
    monkeypatch.setattr(pipeline_stages, "current_platform", platform)
    monkeypatch.setattr(pipeline_stages, "_chosen", None)
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored after the test
    monkeypatch.delenv(VARIABLE)

    def chosen(
        length: int = 10**6, nodes: int = 1, cache: int | None = None, pp: int = 2
    ) -> str | None:
        stub: Any = VllmConfigStub(tmp_path / "model", pp=pp, max_model_len=length)
        stub.parallel_config.nnodes, stub.kv_transfer_config = nodes, None
        stub.scheduler_config = SimpleNamespace(max_num_seqs=8)
        stub.cache_config.gpu_memory_utilization = 0.9
        stub.cache_config.kv_cache_memory_bytes = cache
        choose_stages(stub)
        return os.environ.get(VARIABLE)

    assert chosen(nodes=2) is None
    assert chosen() == chosen(cache=1 << 29) == "2,6"
    assert chosen(length=1) == "4,4"  # hardly a cache
    assert chosen(pp=1) is None  # nor does a later engine inherit the stages
    assert chosen() == "2,6"
    for role, stages in (("draft", "2,6"), ("generate", None)):
        ForeignCodeHook.verify_and_update_config(requested(runner_type=role))
        assert os.environ.get(VARIABLE) == stages
    monkeypatch.setenv(VARIABLE, "3,5")
    assert chosen() == "3,5"
