"""Models that nobody compressed, served by our layers: those of a gac model of the same dims."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import assert_agrees
from tests.serving.engines import (
    CPU_RANKS,
    GPU_OPTIONS,
    OPTIONS,
    answers,
    each_in_engine_process,
    in_engine_process,
)
from tests.serving.test_families import FAMILY, dense_config
from tests.serving.test_fp8_linear import distance, scored
from tests.support.dense_models import write
from tests.support.stored_models import logits_of
from vllm_gac import demo

OURS, GAC = "GacDecoderLayer", {"attention_backend": "GAC"}


def _served(directory: str, ranks: int) -> list[Any]:
    """Answers on a CPU, as if --attention-backend GAC were for one; and the layers' class."""
    from vllm import LLM

    from vllm_gac.serving.config import engine_options

    engine_options.gac_backend_requested = lambda vllm_config: True
    engine_options.check_backends = lambda vllm_config: None
    llm = LLM(directory, **OPTIONS, tensor_parallel_size=ranks)
    return [answers(llm), llm.collective_rpc(_layer)]


def _layer(worker: Any) -> str:
    return type(worker.get_model().model.layers[0]).__name__


def _agree(models: Sequence[Path], ranks: int = 1, **env: str) -> None:
    calls = [[str(model), ranks] for model in models]
    served = each_in_engine_process(_served, calls, VLLM_ALLOW_INSECURE_SERIALIZATION="1", **env)
    for model, (answered, layers) in zip(models, served, strict=True):
        assert layers == [OURS] * ranks, model
        assert_agrees(answered, partial(logits_of, model), model)


@pytest.mark.slow
def test_dense_models_of_every_family_match_the_reference(tmp_path: Path) -> None:
    _agree([write(tmp_path / name, dense_config(name)) for name in FAMILY])


@pytest.mark.slow
def test_more_ranks_than_kv_heads_match_the_reference(tmp_path: Path) -> None:
    _agree([write(tmp_path / "qwen2", dense_config("qwen2"))], ranks=2, **CPU_RANKS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo", "qwen2"])  # the other has biases
def test_fp8_is_as_accurate_as_by_vllms_layers(name: str, tmp_path: Path) -> None:
    model = str(demo.MODEL if name == "demo" else write(tmp_path / name, dense_config(name)))
    quantized = {"quantization": "fp8_per_tensor"}
    stock = GPU_OPTIONS | {"load_format": "auto"}
    exact, theirs, ours = (
        in_engine_process(scored, model, options, True)
        for options in (stock, stock | quantized, GPU_OPTIONS | GAC | quantized)
    )
    assert [made["fused"] for made in (exact, theirs, ours)] == [False, False, True]
    assert 0 < distance(ours, exact) < 1.25 * distance(theirs, exact)
