"""Options that our attention or gac models do not support are refused before a GPU is touched.

Those of a gac model, and those of a dense one with --attention-backend GAC.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, CacheConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.serving.stubs import run_on
from tests.support.dense_models import config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import KeyLayout, ModelLayout, ValueLayout, layout_of
from vllm_gac.layout.families import FAMILIES
from vllm_gac.serving.config import cache_layout, engine_options
from vllm_gac.serving.config.engine_options import check_engine_options, gac_backend_requested
from vllm_gac.serving.config.foreign_code import ForeignCodeHook
from vllm_gac.serving.plugin import register

MODULES = (cache_layout, engine_options)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    run_on(monkeypatch, (9, 0), *MODULES)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_KV_CACHE_LAYOUT"):
        monkeypatch.delenv(name, raising=False)


def requested(
    cache_dtype: Any = "auto",
    *,
    drafted: int | None = None,
    attention: dict[str, Any] | None = None,
    mfu: bool = False,
    heads: int = 32,
    lora: object = None,
    sizes: dict[str, int] | None = None,
    **model: Any,
) -> Any:
    """What vLLM makes of these options; `sizes` are of its ParallelConfig, `model` of its model."""
    model_config = {
        "model": "my-model",
        "architecture": "LlamaForCausalLM",
        "runner_type": "generate",
        "dtype": torch.bfloat16,
        "hf_config": SimpleNamespace(),
        "quantization": None,
        "quantization_config": None,
        "get_num_attention_heads": lambda parallel: heads,
        "get_num_kv_heads": lambda parallel: 1,
        "get_head_size": lambda: 128,
    }
    speculative = SimpleNamespace(
        method="ngram", num_speculative_tokens=drafted, attention_backend=None
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(**model_config | model),
        cache_config=CacheConfig(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(**vars(ParallelConfig()) | (sizes or {})),
        speculative_config=None if drafted is None else speculative,
        attention_config=AttentionConfig(**attention or {}),
        observability_config=SimpleNamespace(enable_mfu_metrics=mfu),
        kv_transfer_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=lora,
        use_v2_model_runner=True,
    )


def check_dense(cache_dtype: Any = "fp8", backend: str | None = "GAC", **options: Any) -> Any:
    """Check what `vllm serve MODEL --attention-backend GAC` makes; returns it as it was changed."""
    config = requested(cache_dtype, attention={"backend": backend}, **options)
    ForeignCodeHook.verify_and_update_config(config)
    return config


@pytest.mark.parametrize(
    "options",
    [
        *({"cache_dtype": dtype} for dtype in ("auto", "bfloat16", "fp8", "fp8_e4m3")),
        {"cache_dtype": "float16", "dtype": torch.float16},
        {"dtype": torch.float16},
        *({"drafted": tokens} for tokens in (1, 7)),
    ],
    ids=str,
)
def test_options_that_our_attention_supports_pass(options: dict[str, Any]) -> None:
    check_engine_options(requested(**options))
    check_dense(**options)


# What our kernels do not take; the reference converts, and takes any number of tokens.
ON_A_GPU: list[tuple[dict[str, Any], str]] = [
    ({"cache_dtype": "float16"}, "^--kv-cache-dtype: .*float16.* --dtype .*bfloat16"),
    ({"cache_dtype": "bfloat16", "dtype": torch.float16}, "bfloat16.* --dtype .*float16"),
    ({"cache_dtype": "fp8_e5m2"}, "^--kv-cache-dtype: .*fp8_e5m2"),
    ({"dtype": torch.float32}, "^--dtype: .*float32"),
    ({"drafted": 8}, "num_speculative_tokens .*8"),
]
ANYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"sizes": {"decode_context_parallel_size": 2}}, "^--decode-context-parallel-size: .*2"),
    ({"sizes": {"prefill_context_parallel_size": 2}}, "^--prefill-context-parallel-size: .*2"),
]


@pytest.mark.parametrize(("options", "named"), ON_A_GPU + ANYWHERE)
def test_options_that_our_attention_does_not_support_are_refused(
    options: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_engine_options(requested(**options))
    with pytest.raises(CheckpointError, match=named):
        check_dense(**options)
    run_on(monkeypatch, None, *MODULES)
    if (options, named) in ON_A_GPU:
        check_engine_options(requested(**options))


def check_gac(**options: Any) -> None:
    check_engine_options(requested(**options))


@pytest.mark.parametrize(
    ("check", "options", "named"),
    [
        (check_gac, {"attention": {"use_non_causal": True}}, "^--attention-config: .*use_non_caus"),
        (check_gac, {"mfu": True}, "^--enable-mfu-metrics"),
        (check_dense, {"architecture": "Gemma2ForCausalLM"}, "my-model.*Gemma2ForCausalLM"),
        (check_dense, {"architecture": "TransformersForCausalLM"}, "TransformersForCausalLM"),
        (
            check_dense,
            {"hf_config": SimpleNamespace(dual_chunk_attention_config={"chunk_size": 8})},
            "my-model.*dual_chunk_attention_config",
        ),
    ],
)
def test_gac_or_dense_models_that_our_attention_does_not_serve_are_refused(
    check: Callable[..., object], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        check(**options)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_BATCH_INVARIANT", "1"), ("VLLM_KV_CACHE_LAYOUT", "LHBNC")]
)
def test_variables_that_our_attention_does_not_honour_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=name):
        check_dense()
    if name == "VLLM_BATCH_INVARIANT":  # the other one is tests/serving/config/test_cache_layout.py
        with pytest.raises(CheckpointError, match=name):
            check_engine_options(requested())


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_fp8_caches_are_refused_where_triton_does_not_support_them(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(monkeypatch, (8, 0), *MODULES)
    for check in (lambda dtype: check_engine_options(requested(dtype)), check_dense):
        with pytest.raises(CheckpointError, match=rf"{dtype}.*8\.0.*bfloat16"):
            check(dtype)
        check("auto")
    run_on(monkeypatch, (8, 9), *MODULES)
    check_engine_options(requested(dtype))


# ---- --attention-backend ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GAC", "gac"])
def test_our_backend_is_named_by_one_flag(name: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--attention-backend", name])
    attention = AttentionConfig(backend=args.attention_backend)
    assert gac_backend_requested(SimpleNamespace(attention_config=attention))  # type: ignore[arg-type]
    assert attention.backend is not None
    assert attention.backend.get_path().endswith("gpu_backend.GacBackend")


def test_only_gac_may_be_named_for_all_layers_and_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gac: dict[str, Any] = {"backend": "GAC"}
    others: list[dict[str, Any]] = [
        {"backend": "GAC_REFERENCE"},
        {"backend_per_kind": {"full_attention": "GAC"}},
    ]
    check_engine_options(requested(attention=gac))
    for attention in others:
        with pytest.raises(CheckpointError, match=r"^--attention-backend GAC"):
            check_engine_options(requested(attention=attention))
    run_on(monkeypatch, None, *MODULES)
    for attention in (gac, *others):
        with pytest.raises(CheckpointError, match=r"^--attention-backend GAC"):
            check_engine_options(requested(attention=attention))


@pytest.mark.parametrize("architecture", [family.architecture for family in FAMILIES.values()])
def test_a_dense_model_of_every_family_is_cached_head_by_head(architecture: str) -> None:
    config = check_dense("auto", architecture=architecture)
    assert config.cache_config.kv_cache_layout == "LBHNC"
    for other in (None, "FLASH_ATTN"):  # then nothing is checked or changed
        config = check_dense(backend=other, architecture=architecture, dtype=torch.float32)
        assert config.cache_config.kv_cache_layout is None


def test_a_dense_models_cache_that_the_checkpoint_scales_is_checked_as_fp8() -> None:
    packed = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    config = check_dense("auto", hf_config=SimpleNamespace(quantization_config=packed))
    assert config.cache_config.cache_dtype == "fp8"


# ---- what the GPU has room for ---------------------------------------------------------------


def latents(group: int, size: int) -> ModelLayout:
    """Two layers; the second has latents of `size` for `group` KV heads each."""
    heads, layout = 8 // group, layout_of(config(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=2,
    ))  # fmt: skip
    latent = replace(
        layout.layers[1], key=KeyLayout("latent", heads, size), value=ValueLayout(heads, size)
    )
    return replace(layout, layers=(layout.layers[0], latent))


def test_heads_too_large_for_the_gpu_are_refused_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = latents(1, 96), latents(2, 256)
    for layout in (small, large):
        engine_options.check_decode_kernel(requested(), layout)
    run_on(monkeypatch, (8, 9), *MODULES)
    engine_options.check_decode_kernel(requested(), small)
    with pytest.raises(CheckpointError, match=r"^layer 1: .*99 KB"):
        engine_options.check_decode_kernel(requested(), large)
    check_dense(drafted=7)
    with pytest.raises(CheckpointError, match=r"^--attention-backend GAC: .* 99 KB"):
        check_dense(drafted=7, heads=48)
    run_on(monkeypatch, None, *MODULES)
    engine_options.check_decode_kernel(requested(), large)
    with pytest.raises(CheckpointError, match=r"^--attention-backend GAC: .* NVIDIA GPU"):
        check_dense()


# ---- experts ---------------------------------------------------------------------------------


EXPERTS = layout_of(config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"]))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"quantization": "fp8_per_tensor"}, "--quantization"),
        ({"hf_config": SimpleNamespace(quantization_config={})}, "config.json: quantization_conf"),
        ({"lora": "some"}, "--enable-lora"),
        ({"sizes": {"enable_expert_parallel": True}}, "--enable-expert-parallel"),
        ({"sizes": {"enable_eplb": True}}, "--enable-eplb"),
        ({"sizes": {"enable_dbo": True}}, "--enable-dbo"),
        ({"sizes": {"data_parallel_size": 2}}, "--data-parallel-size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_options_that_were_not_tried_with_experts_are_refused(
    changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{option}.*experts"):
        engine_options.check_experts(requested(**changes), EXPERTS)
    engine_options.check_experts(requested(), EXPERTS)
    engine_options.check_experts(requested(**changes), layout_of(config()))  # without experts


# ---- LoRA ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "is_refused"),
    [
        (["q_proj"], True),
        (["A", "B", "qkv_proj"], True),
        (["model.layers.1.self_attn.q_proj"], True),
        (["A", "B", "o_proj", "gate_up_proj", "model.layers.0.self_attn.q_proj"], False),
        (None, False),
    ],
)
def test_targets_of_adapters_that_are_low_rank_are_refused(
    targets: list[str] | None, is_refused: bool
) -> None:
    layout, options = layout_of(config()), requested(lora=SimpleNamespace(target_modules=targets))
    low_rank = replace(layout.layers[1], ranks={"self_attn.q_proj": 8})
    layout = replace(layout, layers=(layout.layers[0], low_rank))
    engine_options.check_lora_targets(requested(), layout)
    if not is_refused:
        engine_options.check_lora_targets(options, layout)
        return
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj") as error:
        engine_options.check_lora_targets(options, layout)
    assert "--lora-target-modules" in str(error.value)


# ---- roles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({}, None),
        ({"runner_type": "draft"}, "draft"),
        ({"runner_type": "pooling", "convert_type": "embed"}, None),
        ({"runner_type": "pooling", "convert_type": "classify"}, "--convert classify"),
        (
            {
                "runner_type": "pooling",
                "convert_type": "classify",
                "hf_config": SimpleNamespace(classifier_from_token=["no", "yes"]),
            },
            None,
        ),
    ],
)
def test_a_gac_model_neither_drafts_nor_has_a_head(
    model: dict[str, Any], named: str | None
) -> None:
    generating = {"runner_type": "generate", "convert_type": "none"}
    model_config = requested(**generating | model).model_config
    if named is None:
        engine_options.check_role(model_config)
    else:
        with pytest.raises(CheckpointError, match=named):
            engine_options.check_role(model_config)
