"""Options that gac models do not support are refused before a GPU is touched."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import AttentionConfig, CacheConfig, ParallelConfig
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

from tests.serving.stubs import run_on
from tests.support.dense_models import config
from vllm_gac.errors import CheckpointError
from vllm_gac.gpu.attention_choice import MAX_HEAD_SIZE
from vllm_gac.layout.dims import KeyLayout, ModelLayout, ValueLayout, layout_of
from vllm_gac.serving.config import engine_options
from vllm_gac.serving.loading import decode_fit
from vllm_gac.serving.plugin import register
from vllm_gac.serving.registration import BACKENDS

MODULES = (engine_options, decode_fit)


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, (9, 0), *MODULES)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


@pytest.fixture
def registered() -> None:
    register()


def _asked(
    cache_dtype: Any = "auto",
    drafted: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    attention: Any = None,
    mfu: bool = False,
    **parallel: int,
) -> Any:
    speculative = None
    if drafted is not None:
        speculative = SimpleNamespace(
            method="ngram", num_speculative_tokens=drafted, attention_backend=None
        )
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=CacheConfig(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(**vars(ParallelConfig()) | parallel),
        speculative_config=speculative,
        attention_config=attention or AttentionConfig(),
        observability_config=SimpleNamespace(enable_mfu_metrics=mfu),
    )


@pytest.mark.parametrize("dtype", engine_options.KV_CACHE_DTYPES)
def test_supported_cache_dtypes_pass(dtype: str) -> None:
    of_model = torch.float16 if dtype == "float16" else torch.bfloat16
    engine_options.check_engine_options(_asked(dtype, dtype=of_model))


@pytest.mark.parametrize(
    "asked",
    [
        *({"dtype": dtype} for dtype in engine_options.DTYPES),
        *({"drafted": tokens} for tokens in (None, 1, 7)),
    ],
    ids=str,
)
def test_half_precision_and_up_to_seven_drafted_tokens_pass(asked: dict[str, Any]) -> None:
    engine_options.check_engine_options(_asked(**asked))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cache_dtype": "float16"}, "float16.* --dtype .*bfloat16"),
        (
            {"cache_dtype": "bfloat16", "dtype": torch.float16},
            "bfloat16.* --dtype .*float16",
        ),
        ({"cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype: .*fp8_e5m2"),
        ({"dtype": torch.float32}, "--dtype: .*float32"),
        ({"drafted": 8}, "num_speculative_tokens .*8"),
    ],
)
def test_what_our_kernels_do_not_take_is_refused_on_a_gpu(
    asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=said):
        engine_options.check_engine_options(_asked(**asked))
    # The reference converts and takes any number; other dtypes the backends there refuse.
    run_on(monkeypatch, None, *MODULES)
    engine_options.check_engine_options(_asked(**asked))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"attention": AttentionConfig(use_non_causal=True)},
            "^--attention-config: .*use_non_causal",
        ),
        ({"mfu": True}, "^--enable-mfu-metrics"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size: .*2"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size: .*2"),
    ],
)
def test_what_no_backend_of_ours_does_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        engine_options.check_engine_options(_asked(**asked))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
def test_fp8_caches_are_refused_where_triton_does_not_support_them(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(monkeypatch, (8, 0), *MODULES)
    with pytest.raises(CheckpointError, match=rf"{dtype}.*8\.0"):
        engine_options.check_engine_options(_asked(dtype))
    engine_options.check_engine_options(_asked("bfloat16"))
    run_on(monkeypatch, (8, 9), *MODULES)
    engine_options.check_engine_options(_asked(dtype))


def _latents(group: int, size: int) -> ModelLayout:
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


def test_layers_too_large_for_the_gpu_are_refused_by_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = _latents(1, 96), _latents(2, 256)
    decode_fit.check_decode_kernel(_asked(), small)
    decode_fit.check_decode_kernel(_asked(), large)
    run_on(monkeypatch, (8, 9), *MODULES)
    decode_fit.check_decode_kernel(_asked(), small)
    with pytest.raises(CheckpointError, match=r"^layer 1: .*99 KB"):
        decode_fit.check_decode_kernel(_asked(), large)
    assert not decode_fit.fits_decode_kernel(large, large.layers[1])
    assert decode_fit.fits_decode_kernel(small, small.layers[1])
    run_on(monkeypatch, None, *MODULES)
    decode_fit.check_decode_kernel(_asked(), large)


def test_only_one_of_our_backends_can_be_asked_for_by_all_layers_and_on_a_gpu(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    gac, reference = (AttentionBackendEnum[name] for name in BACKENDS)
    engine_options.check_engine_options(_asked(attention=AttentionConfig(backend=gac)))
    others = (
        AttentionConfig(backend=reference),
        AttentionConfig(backend_per_kind={"full_attention": gac}),
    )
    for attention in others:
        with pytest.raises(CheckpointError, match=r"^--attention-backend GAC"):
            engine_options.check_engine_options(_asked(attention=attention))
    run_on(monkeypatch, None, *MODULES)
    for attention in (AttentionConfig(backend=gac), *others):
        with pytest.raises(CheckpointError, match=r"^--attention-backend GAC"):
            engine_options.check_engine_options(_asked(attention=attention))


def test_a_choice_of_kernels_that_our_layers_do_not_follow_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: told.append(text % values))
    monkeypatch.setattr(engine_options, "logger", logger)
    engine_options.check_engine_options(_asked())
    assert told == []
    attention: Any = {"backend": "TRITON_ATTN", "flash_attn_version": 2}
    engine_options.check_engine_options(_asked(attention=AttentionConfig(**attention)))
    assert told[0].startswith("TRITON_ATTN, FlashAttention 2")


def _offloaded(backend: Any = "auto", gigabytes: float = 4, group: int = 0) -> Any:
    prefetch = PrefetchOffloadConfig(offload_group_size=group)
    uva = UVAOffloadConfig(cpu_offload_gb=gigabytes)
    return SimpleNamespace(offload_config=OffloadConfig(backend, uva=uva, prefetch=prefetch))


def test_latent_keys_whose_weights_are_lent_by_the_step_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents, dense = _latents(1, 96), _latents(1, 96)
    dense = replace(dense, layers=dense.layers[:1])
    monkeypatch.setattr(engine_options, "is_uva_available", lambda: True)
    engine_options.check_offloading(_offloaded(), latents)
    monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    for lent in (_offloaded(), _offloaded("uva", group=2)):
        with pytest.raises(CheckpointError, match=r"^--cpu-offload-gb: .* layer 1 "):
            engine_options.check_offloading(lent, latents)
        engine_options.check_offloading(lent, dense)
    for other in (_offloaded(gigabytes=0), _offloaded("prefetch", group=2), _offloaded(group=2)):
        engine_options.check_offloading(other, latents)
    run_on(monkeypatch, None, *MODULES)
    engine_options.check_offloading(_offloaded(), latents)


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(CheckpointError, match="VLLM_BATCH_INVARIANT"):
        engine_options.check_engine_options(_asked())


def _model(runner: str = "generate", convert: str = "none", **overrides: str) -> Any:
    return SimpleNamespace(
        model="gac",
        runner_type=runner,
        convert_type=convert,
        model_class_overrides=overrides,
        hf_config=SimpleNamespace(),
    )


def test_a_gac_model_does_not_draft() -> None:
    engine_options.check_role(_model())
    with pytest.raises(CheckpointError, match="draft"):
        engine_options.check_role(_model("draft"))


def test_another_model_class_is_refused() -> None:
    engine_options.check_role(_model(LlamaForCausalLM="mine:Llama"))
    with pytest.raises(CheckpointError, match=r"--model-class-overrides: .*mine:Llama"):
        engine_options.check_role(_model(GacLlamaForCausalLM="mine:Llama"))


def test_a_gac_model_embeds_and_classifies_by_tokens_but_has_no_head() -> None:
    engine_options.check_role(_model("pooling", "embed"))
    by_tokens = _model("pooling", "classify")
    with pytest.raises(CheckpointError, match="--convert classify"):
        engine_options.check_role(by_tokens)
    by_tokens.hf_config.classifier_from_token = ["no", "yes"]
    engine_options.check_role(by_tokens)


def test_heads_that_no_prefill_kernel_takes_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(monkeypatch, (9, 0), *MODULES)
    fitting = _latents(1, 96)
    assert decode_fit.fits_decode_kernel(fitting, fitting.layers[1])
    larger = replace(fitting, head_dim=MAX_HEAD_SIZE + 64)
    assert not decode_fit.fits_decode_kernel(larger, larger.layers[1])
