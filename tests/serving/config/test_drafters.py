"""Drafters beside --attention-backend GAC: with vLLM's own configs, as its front end makes them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import run_on
from tests.support.dense_models import config, write
from vllm_gac.serving.config import engine_options
from vllm_gac.serving.plugin import register

V1, V2 = "0", "1"  # vLLM's model runners
THREE: dict[str, Any] = {"num_speculative_tokens": 3}
EAGLE = {"method": "eagle", "model": "dense", **THREE}
MEDUSA, DRAFT_MODEL = {"method": "medusa", "model": "dense", **THREE}, {"model": "dense", **THREE}
HIDDEN_STATES = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
OTHER, OURS = {"attention_backend": "FLASH_ATTN"}, {"attention_backend": "GAC"}

FLAG = "--attention-backend GAC"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "dense", config(vocab_size=4096), torch.bfloat16, tokenizer=False)
    write_model(folder / "gac", HETEROGENEOUS[:2])
    return {name: str(folder / name) for name in ("dense", "gac")}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    run_on(monkeypatch, (9, 0), engine_options)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.mark.parametrize(
    ("backend", "runner", "speculative", "named"),
    [
        ("GAC", V2, {"method": "ngram", **THREE}, None),
        ("GAC", V2, HIDDEN_STATES, None),
        ("GAC", V1, MEDUSA, None),
        *(("GAC", V2, method, FLAG) for method in (EAGLE, DRAFT_MODEL, DRAFT_MODEL | OTHER)),
        ("GAC", V1, EAGLE, FLAG),
        (None, V1, DRAFT_MODEL | OURS, "--speculative-config: attention_backend"),
        (None, V2, EAGLE | OURS, "--speculative-config: attention_backend"),
        (None, V2, EAGLE, None),
        (None, V2, DRAFT_MODEL, None),
    ],
)
@pytest.mark.parametrize("target", ["dense", "gac"])
def test_a_drafter_that_would_get_our_attention_is_refused(
    target: str,
    backend: Any,
    runner: str,
    speculative: dict[str, Any],
    named: str | None,
    models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    drafter = {"model": models["dense"]} if "model" in speculative else {}
    arguments = EngineArgs(
        model=models[target],
        attention_backend=backend,
        speculative_config=speculative | drafter,
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        arguments.create_engine_config()


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3"])
def test_a_gac_model_has_no_heads_that_draft(method: str, models: dict[str, str]) -> None:
    """For MTP, vLLM takes the model itself if none is named; nothing trained heads for it."""
    drafter = {} if method == "mtp" else {"model": models["gac"]}
    arguments = EngineArgs(
        model=models["gac"],
        speculative_config={"method": method, **THREE, **drafter},
        dtype="bfloat16",
        skip_tokenizer_init=True,
    )
    with pytest.raises(ValueError, match="draft"):
        arguments.create_engine_config()
