"""--attention-backend GAC for models that nobody compressed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import AttentionConfig, CacheConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.serving.stubs import run_on
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import FAMILIES
from vllm_gac.serving.config import cache_layout, engine_options
from vllm_gac.serving.config.engine_options import gac_backend_requested
from vllm_gac.serving.config.foreign_code import ForeignCodeHook
from vllm_gac.serving.loading import decode_fit
from vllm_gac.serving.plugin import register

MODULES = (cache_layout, engine_options, decode_fit)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    run_on(monkeypatch, (9, 0), *MODULES)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_KV_CACHE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)


def drafted(tokens: int) -> Any:
    return SimpleNamespace(method="ngram", num_speculative_tokens=tokens, attention_backend=None)


def _asked(
    backend: str | None = "GAC", cache_dtype: Any = "fp8", heads: int = 32, **changes: Any
) -> Any:
    """What vLLM makes of `vllm serve MODEL --attention-backend BACKEND`."""
    model = {
        "model": "my-model",
        "architecture": "LlamaForCausalLM",
        "dtype": torch.bfloat16,
        "hf_config": SimpleNamespace(),
        "get_num_attention_heads": lambda parallel: heads,
        "get_num_kv_heads": lambda parallel: 1,
        "get_head_size": lambda: 128,
    }
    sizes = {name: changes.pop(name) for name in [*changes] if name.endswith("_size")}
    settings = {
        "cache_config": CacheConfig(cache_dtype=cache_dtype),
        "parallel_config": SimpleNamespace(**vars(ParallelConfig()) | sizes),
        "speculative_config": changes.pop("speculative_config", None),
        "attention_config": AttentionConfig(backend=backend),  # type: ignore[arg-type]
        "kv_transfer_config": None,
        "use_v2_model_runner": True,
    }
    return SimpleNamespace(model_config=SimpleNamespace(**model | changes), **settings)


def _hooked(asked: Any) -> str | None:
    ForeignCodeHook.verify_and_update_config(asked)
    layout: str | None = asked.cache_config.kv_cache_layout
    return layout


@pytest.mark.parametrize("name", ["GAC", "gac"])
def test_users_name_it_by_one_flag(name: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--attention-backend", name])
    asked = AttentionConfig(backend=args.attention_backend)
    assert gac_backend_requested(SimpleNamespace(attention_config=asked))  # type: ignore[arg-type]
    assert asked.backend is not None
    assert asked.backend.get_path().endswith("gpu_backend.GacBackend")


@pytest.mark.parametrize("architecture", [family.architecture for family in FAMILIES.values()])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8"])
def test_gac_attention_is_taken_for_every_family_and_cached_head_by_head(
    architecture: str, dtype: str
) -> None:
    assert _hooked(_asked(cache_dtype=dtype, architecture=architecture)) == "LBHNC"


def test_a_cache_that_the_checkpoint_scales_is_checked_as_fp8() -> None:
    packed = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    asked = _asked(cache_dtype="auto", hf_config=SimpleNamespace(quantization_config=packed))
    _hooked(asked)
    assert asked.cache_config.cache_dtype == "fp8"


def test_nothing_changes_where_nobody_asks() -> None:
    for other in (None, "FLASH_ATTN"):
        assert _hooked(_asked(other, dtype=torch.float32)) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architecture": "Gemma2ForCausalLM"},
            "my-model.*Gemma2ForCausalLM",
        ),
        ({"architecture": "TransformersForCausalLM"}, "TransformersForCausalLM"),
        ({"dtype": torch.float32}, "^--dtype: .*float32"),
        ({"cache_dtype": "fp8_e5m2"}, "^--kv-cache-dtype: .*fp8_e5m2"),
        ({"cache_dtype": "float16"}, "^--kv-cache-dtype: .*float16.* --dtype .*bfloat16"),
        ({"speculative_config": drafted(8)}, "num_speculative_tokens"),
        ({"decode_context_parallel_size": 2}, "^--decode-context-parallel-size"),
        (
            {"hf_config": SimpleNamespace(dual_chunk_attention_config={"chunk_size": 8})},
            "my-model.*dual_chunk_attention_config",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        _hooked(_asked(**changes))


def test_gac_attention_needs_a_gpu_with_the_format_and_room_for_the_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_on(monkeypatch, (8, 0), *MODULES)
    with pytest.raises(CheckpointError, match=r"8\.0.*bfloat16"):
        _hooked(_asked())
    _hooked(_asked(cache_dtype="auto"))
    run_on(monkeypatch, (8, 9), *MODULES)
    _hooked(_asked(speculative_config=drafted(7)))
    with pytest.raises(CheckpointError, match=r"^--attention-backend GAC: .* 99 KB"):
        _hooked(_asked(speculative_config=drafted(7), heads=48))
    run_on(monkeypatch, None, *MODULES)
    with pytest.raises(CheckpointError, match=r"^--attention-backend GAC: .* NVIDIA GPU"):
        _hooked(_asked())


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_BATCH_INVARIANT", "1"), ("VLLM_KV_CACHE_LAYOUT", "LHBNC")]
)
def test_variables_that_gac_attention_does_not_honour_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=name):
        _hooked(_asked())
