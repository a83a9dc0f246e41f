"""A dense model gives the same answers with --load-format gac and auto."""

from pathlib import Path

import pytest

from tests.serving.agreement import PROMPTS
from tests.serving.server import serve
from vllm_gac import demo


@pytest.mark.slow
def test_a_dense_model_gives_the_same_logprobs_under_gac_and_auto(tmp_path: Path) -> None:
    served = {}
    for load_format in ("gac", "auto"):
        log = tmp_path / load_format
        with serve(demo.MODEL, log, "--load-format", load_format) as server:
            served[load_format] = server.completions(PROMPTS[:2], 16)
        assert "Resolved architecture: LlamaForCausalLM" in log.read_text()
    assert served["gac"] == served["auto"]
