"""A dense model gives the same answers with --load-format gac and auto."""

from typing import Any

import pytest

from tests.serving.engines import OPTIONS, answers, each_in_engine_process
from vllm_gac import demo


@pytest.mark.slow
def test_a_dense_model_gives_the_same_logprobs_under_gac_and_auto() -> None:
    gac, auto = each_in_engine_process(_loaded_by, [["gac"], ["auto"]])
    assert gac["loader"] == "GacModelLoader"
    assert auto["loader"] == "DefaultModelLoader"
    assert gac["architecture"] == auto["architecture"] == "LlamaForCausalLM"
    assert gac["answers"] == auto["answers"]


def _loaded_by(load_format: str) -> dict[str, Any]:
    from vllm import LLM
    from vllm.model_executor.model_loader import get_model_loader

    llm = LLM(str(demo.MODEL), **OPTIONS | {"load_format": load_format, "dtype": "bfloat16"})
    config = llm.llm_engine.vllm_config
    return {
        "answers": answers(llm),
        "architecture": config.model_config.architecture,
        "loader": type(get_model_loader(config.load_config)).__name__,
    }
