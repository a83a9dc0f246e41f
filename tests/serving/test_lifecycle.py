"""A running engine reloads weights, the same or others, and sleeps. Layers have all shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.engines import GPU_OPTIONS, OPTIONS, answers, assert_same, in_engine_process
from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.stored_models import change_tensors


@pytest.mark.slow
def test_reloaded_weights_match_a_new_engine(tmp_path: Path) -> None:
    """The prefix cache holds keys of the old weights. After a reset it is filled again."""
    write_model(tmp_path / "model", HETEROGENEOUS)  # the last layer is padded at load time
    write_model(tmp_path / "other", HETEROGENEOUS)
    generator = torch.Generator().manual_seed(1)
    change_tensors(
        tmp_path / "other" / "model.safetensors",
        lambda tensors: [
            tensor.mul_(0.5 + torch.rand(tensor.shape, generator=generator))
            for tensor in tensors.values()
        ],
    )
    reloaded = in_engine_process(_reload, str(tmp_path / "model"), str(tmp_path / "other"))
    expected = reloaded["a new engine"]
    assert reloaded["padded"] == [64, 40, 256, 40]
    assert_same(reloaded["again"], reloaded["first"])
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in reloaded["first"]]
    assert_same(reloaded["other"], expected)
    assert reloaded["hits"] > 0
    assert_same(reloaded["other from the prefix cache"], expected)


def _reload(model: str, other: str) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(model, **OPTIONS)
    by_step: dict[str, Any] = {"first": answers(llm)}
    by_step["padded"] = llm.collective_rpc(_dims_of_the_last_layer)[0]
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    by_step["again"] = answers(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
    assert llm.reset_prefix_cache()
    by_step["other"] = answers(llm)
    output = llm.generate([{"prompt_token_ids": list(range(5, 200))}] * 2, use_tqdm=False)[-1]
    by_step["hits"] = output.num_cached_tokens
    by_step["other from the prefix cache"] = answers(llm)
    del llm
    by_step["a new engine"] = answers(LLM(other, **OPTIONS))
    return by_step


def _dims_of_the_last_layer(worker: Any) -> list[int]:
    """Served key size, value size, MLP width and rank. Runs in the worker."""
    layer = worker.get_model().model.layers[-1]
    geometry = layer.self_attn.geometry
    rank = layer.mlp.up_proj.A.output_size
    return [geometry.key_size, geometry.value_size, layer.mlp.down_proj.input_size, rank]


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_outputs_are_the_same_after_sleep(level: int, tmp_path: Path) -> None:
    """CUDA graphs keep the addresses of weights. At level 2 weights are read and padded again."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    slept = in_engine_process(_sleep, str(tmp_path / "model"), level)
    assert slept["freed"] > 2**30
    assert_same(slept["after"], slept["before"])


def _sleep(model: str, level: int) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(model, enable_sleep_mode=True, **GPU_OPTIONS)
    before = answers(llm)
    free = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    freed = torch.cuda.mem_get_info()[0] - free
    if level == 1:
        llm.wake_up()
    else:
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    return {"before": before, "freed": freed, "after": answers(llm)}
