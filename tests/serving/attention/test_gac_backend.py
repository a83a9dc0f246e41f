"""Which kernels a layer gets on a GPU, made up here, and on a CPU; our backend in vLLM's layer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.kernels.head_scales import row_scales
from tests.kernels.test_decode import random_cache
from tests.support.processes import run_interpreted
from vllm_gac.errors import GacError, ProfileError
from vllm_gac.gpu.attention_choice import Gpu, Kernels
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.kernels.decode.launch import decode_scratch
from vllm_gac.kernels.torch_reference import paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.prefill import PrefillPlan, _entry
from vllm_gac.serving.attention import gpu_backend, layer
from vllm_gac.serving.attention.step import StepLimits
from vllm_gac.serving.plugin import register

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
# One for all heads, and one for each.
SCALES = [
    (torch.tensor(0.5), torch.tensor(1.5)),
    (torch.tensor([0.2, 2.0]), torch.tensor([3.0, 0.3])),
]
DECODING, SMALL, CONTEXTS = [1, 1, 1], [1, 1, 17], [37, 1, 20]


def step(queries: list[int], contexts: list[int], on_host: list[int] | None = None) -> Any:
    """vLLM's description of a batch, decoding requests first; `on_host` bounds `contexts`."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(on_host or contexts, dtype=torch.int32),
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        block_table_tensor=torch.arange(4 * len(queries), dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
    )


def layer_of(cache_dtype: Any, window: int | None = None) -> Attention:
    """The layer that a model of vLLM's makes, as on a GPU."""
    gpu_backend.__dict__.update(
        check_gac_on_dense=lambda vllm_config: None,
        attention_kernels=lambda heads, gac_only: Kernels("gac", "gac", "FA3", measured=False),
        installed_gpu=lambda: SimpleNamespace(capability=(9, 0), installed=("FA3",)),
    )
    torch.set_default_dtype(torch.float16)
    config = CacheConfig(cache_dtype=cache_dtype)
    with set_current_vllm_config(VllmConfig(cache_config=config)):
        return Attention(
            HEADS,
            SIZE,
            SIZE**-0.5,
            KV_HEADS,
            cache_config=config,
            per_layer_sliding_window=window,
            prefix="model.layers.0.self_attn.attn",
            attn_backend=gpu_backend.GacBackend,
        )


def error_of(
    layer: Attention, scales: tuple[torch.Tensor, torch.Tensor], queries: list[int]
) -> float:
    """The error of a step that needs no prefill against fp32, relative to the result."""
    limits = StepLimits(1, 0, piece=5, piece_keys=1000)
    generator = torch.Generator().manual_seed(0)
    quantized = layer.impl.quantized
    geometry = CacheGeometry(HEADS, SIZE, KV_HEADS, SIZE, KV_HEADS, SIZE)
    cache, table = random_cache(geometry, CONTEXTS, BLOCK, generator)
    if quantized:
        cache = cache.to(torch.float8_e4m3fn)
        layer._k_scale, layer._v_scale = scales  # as vLLM's loader of either kind leaves them
    else:
        cache = cache.half()
    tokens = sum(queries)
    common = step(queries, CONTEXTS)
    common.block_table_tensor = table
    builder = object.__new__(gpu_backend.GacBuilder)
    scratch = decode_scratch(geometry, limits.piece, torch.device("cpu"))
    vars(builder).update(limits=limits, scratch=scratch)
    query = torch.randn(tokens, HEADS, SIZE, generator=generator)
    output = torch.full_like(query, float("nan"))
    stored = cache.view(torch.uint8) if quantized else cache  # as vLLM does
    unread = torch.empty(tokens, KV_HEADS, SIZE)
    layer.impl.forward(layer, query, unread, unread, stored, builder.build(0, common), output)
    numbers = cache.float()
    if quantized:
        numbers *= row_scales(geometry, *scales)
    expected = torch.zeros(output.shape, dtype=torch.float32)
    starts, window = common.query_start_loc.tolist(), layer.impl.window
    scale = SIZE**-0.5
    paged_attention(query, numbers, table, starts, CONTEXTS, geometry, scale, expected, window)
    return float((output.float() - expected).norm() / expected.norm())


def check_decoding(cache_dtype: str, window: int | None, scales: int, queries: list[int]) -> None:
    """A layer of vLLM's decodes as plain torch, with these of SCALES."""
    register()
    error = error_of(layer_of(cache_dtype, window), SCALES[scales], queries)
    assert error < 5e-3, error


EQUAL = CacheGeometry(32, 128, 8, 128, 8, 128)
UNEQUAL = CacheGeometry(32, 96, 8, 96, 8, 64)
ARGUMENTS = (32, 128, 0.1, 8, None, None, "auto")


@pytest.mark.slow
def test_gac_backend_matches_torch_in_tritons_interpreter() -> None:
    kinds = [("auto", None, 0), ("fp8", None, 0), ("fp8", 17, 0), ("fp8", None, 1)]
    calls = [(*kind, queries) for kind in kinds for queries in (DECODING, SMALL)]
    run_interpreted(check_decoding, calls)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_name=lambda: "Made Up 100")
    hopper = Gpu((9, 0), ("FA2", "FA3", "FA4", "xformers"))
    monkeypatch.setattr(layer, "current_platform", platform)
    for module in (layer, gpu_backend):
        monkeypatch.setattr(module, "installed_gpu", lambda: hopper)
    layer.attention_kernels.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_without_a_profile_a_gpu_gets_defaults_or_the_requested_kernels() -> None:
    assert layer.attention_kernels(EQUAL).backend == "stock"
    assert layer.attention_kernels(EQUAL, gac_only=True) == Kernels("gac", "gac", "FA3", False)
    assert layer.attention_kernels(UNEQUAL) == Kernels("gac", "gac", "FA4", False)
    with pytest.raises(GacError, match=r"\(512, 64\).*Made Up 100"):
        layer.attention_kernels(CacheGeometry(32, 512, 8, 512, 8, 64))


@pytest.mark.usefixtures("gpu")
def test_profile_option_selects_kernels(tmp_path: Path) -> None:
    times = [
        _entry(PrefillPlan(96, 64), kernel, "fresh", time)
        for kernel, time in (("FA3", 200.0), ("FA4", 250.0))
    ]
    profile = read_profile("h200").model_copy(update={"prefill_kernels": times})
    write_profile(tmp_path / "profile.json", profile)
    path = str(tmp_path / "profile.json")
    assert layer.attention_kernels(UNEQUAL, path) == Kernels("gac", "gac", "FA3", True)
    with pytest.raises(ProfileError, match="h900"):
        layer.attention_kernels(UNEQUAL, "h900")


def test_a_cpu_has_vllms_kernel_for_some_heads_and_the_reference_for_the_rest() -> None:
    layer.attention_kernels.cache_clear()
    assert layer.attention_kernels(EQUAL).prefill == "stock"
    for geometry in (replace(EQUAL, form="latent"), UNEQUAL):
        kernels = layer.attention_kernels(geometry)
        assert kernels == Kernels("gac", "reference", "reference", False)


@pytest.mark.usefixtures("gpu")
def test_a_layer_without_geometry_has_the_heads_that_vllm_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(gpu_backend, "check_gac_on_dense", checked.append)
    config = VllmConfig()
    with set_current_vllm_config(config):
        impl = gpu_backend.GacImpl(*ARGUMENTS)
        assert checked == [config]
        assert impl.geometry == EQUAL
        assert impl.prefill == "FA3"
        assert not impl.supports_quant_query_input  # queries stay in 16 bits
        gpu_backend.GacImpl(*ARGUMENTS, geometry=UNEQUAL, prefill="FA4")
    assert checked == [config]


@pytest.mark.usefixtures("gpu")
def test_builders_find_the_scratch_that_vllm_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config, query = VllmConfig(), torch.empty(3, 32, 96)
    with set_current_vllm_config(config):
        impl = gpu_backend.GacImpl(*ARGUMENTS, geometry=UNEQUAL, prefill="FA4")
    made: Any = SimpleNamespace(impl=impl, kv_cache_torch_dtype=torch.bfloat16)
    layers = [(made, impl.prefill_layer)]
    monkeypatch.setattr(gpu_backend, "prefill_layers", lambda config: iter(layers))
    monkeypatch.setattr(gpu_backend, "max_gathered_tokens", lambda *_: 0)
    impl.forward(made, query, query, query, torch.empty(0), None, query)
    scratch = impl.scratch
    assert scratch is not None
    assert gpu_backend._shared_scratch(config, query.device) is scratch


def test_unequal_head_sizes_are_refused() -> None:
    impl = SimpleNamespace(geometry=EQUAL)
    attention: Any = SimpleNamespace(impl=impl, head_size=128, head_size_v=128)
    gpu_backend._check_sizes("model.layers.3", attention)
    attention.head_size_v = 64
    with pytest.raises(GacError, match=r"^model\.layers\.3: .*128.*64"):
        gpu_backend._check_sizes("model.layers.3", attention)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({}, []),
        ({"has_sliding_window": True}, []),
        ({"use_kv_connector": True}, []),
        ({"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True}, []),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype not supported"]),
        ({"dtype": torch.float32}, ["dtype not supported"]),
        ({"block_size": 8}, ["block_size not supported"]),
        ({"has_sink": True}, ["attention sinks not supported"]),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"use_mm_prefix": True}, ["partial multimodal token full attention not supported"]),
        ({"attn_type": "encoder_only"}, ["attention type encoder_only not supported"]),
        ({"use_non_causal": True}, ["non-causal attention not supported"]),
        ({"use_batch_invariant": True}, ["batch invariance not supported"]),
        ({"use_dcp": True}, ["DCP not supported"]),
        ({"use_pcp": True}, ["PCP not supported"]),
    ],
)
def test_backend_reports_unsupported_options(change: dict[str, Any], reasons: list[str]) -> None:
    register()
    backend = AttentionBackendEnum["GAC"].get_class()
    requested: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    assert backend.validate_configuration(**requested | change) == reasons
