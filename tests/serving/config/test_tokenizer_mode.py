"""A model of Mistral's own files is served with the tokens of its dense model."""

import json
import logging
import shutil
from pathlib import Path

import mistral_common
import pytest
from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_gac import demo
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.serving.plugin import register
from vllm_gac.steps.rewritten import write_files

TEKKEN = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
VOCABULARY, SPECIAL = 4096, 1000


def tokens(directory: Path) -> list[int]:
    """What vLLM makes of a text that the demo's tokenizer and Mistral's split differently."""
    register()
    tokenizer = cached_tokenizer_from_config(ModelConfig(model=str(directory)))
    return list(tokenizer.encode("def put(self, item): 12345"))


def dense(directory: Path, *, weights: bool) -> Path:
    """The demo, with Mistral's tokenizer of as many tokens, and Mistral's `weights` or none."""
    shutil.copytree(demo.MODEL, directory)
    raw = json.loads(TEKKEN.read_text())
    raw["config"] |= {
        "default_vocab_size": VOCABULARY,
        "num_vocab_tokens": VOCABULARY - SPECIAL,
        "default_num_special_tokens": SPECIAL,
    }
    raw["vocab"] = raw["vocab"][: VOCABULARY - SPECIAL]
    (directory / "tekken.json").write_text(json.dumps(raw))
    if weights:
        (directory / "consolidated.safetensors").touch()
    return directory


@pytest.mark.parametrize("weights", [True, False])
def test_a_compressed_model_has_the_tokens_of_its_dense_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: bool
) -> None:
    caplog.set_level(logging.WARNING)  # vLLM may have been told to log more
    source = dense(tmp_path / "dense", weights=weights)
    raw = json.loads((source / "config.json").read_text())
    gac = raw | {"architectures": [ARCHITECTURE], "gac": layout_of(raw).section()}
    # As it comes from the dense model, and as a later step writes that again.
    for start, out in ((source, tmp_path / "once"), (tmp_path / "once", tmp_path / "twice")):
        out.mkdir()
        write_files(start, out, gac, "card")
    expected = tokens(source)
    assert tokens(tmp_path / "once") == tokens(tmp_path / "twice") == expected
    assert (expected != tokens(demo.MODEL)) == weights
    assert caplog.messages == []
    (tmp_path / "exported").mkdir()
    write_files(tmp_path / "twice", tmp_path / "exported", raw, "card")
    assert ("--tokenizer-mode mistral" in caplog.text) == weights
