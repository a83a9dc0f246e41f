"""Which kernels a layer gets on a GPU, made up here, and on a CPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_gac.errors import GacError, ProfileError
from vllm_gac.gpu.attention_choice import Gpu, Kernels
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.prefill import PrefillPlan, _entry
from vllm_gac.serving.attention import layer

EQUAL = CacheGeometry(32, 128, 8, 128, 8, 128)
UNEQUAL = CacheGeometry(32, 96, 8, 96, 8, 64)
HOPPER = Gpu((9, 0), ("FA2", "FA3", "FA4", "xformers"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_name=lambda: "Made Up 100")
    monkeypatch.setattr(layer, "current_platform", platform)
    monkeypatch.setattr(layer, "installed_gpu", lambda: HOPPER)
    layer._attention_kernels.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_was_not_measured_gets_defaults() -> None:
    assert layer.attention_kernels(EQUAL).backend == "stock"
    assert layer.attention_kernels(UNEQUAL) == Kernels("gac", "gac", "FA4", False)


@pytest.mark.usefixtures("gpu")
def test_the_loaders_profile_decides(tmp_path: Path) -> None:
    times = [
        _entry(PrefillPlan(96, 64), kernel, "fresh", time)
        for kernel, time in (("FA3", 200.0), ("FA4", 250.0))
    ]
    profile = read_profile("h200").model_copy(update={"prefill_kernels": times})
    write_profile(tmp_path / "profile.json", profile)
    options = {"gpu": str(tmp_path / "profile.json")}
    assert layer.attention_kernels(UNEQUAL, options) == Kernels("gac", "gac", "FA3", True)
    with pytest.raises(ProfileError, match="h900"):
        layer.attention_kernels(UNEQUAL, {"gpu": "h900"})


@pytest.mark.usefixtures("gpu")
def test_heads_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(GacError, match=r"\(512, 64\).*Made Up 100"):
        layer.attention_kernels(CacheGeometry(32, 512, 8, 512, 8, 64))


def test_a_cpu_has_vllms_kernel_for_some_heads_and_the_reference_for_the_rest() -> None:
    layer._attention_kernels.cache_clear()
    assert layer.attention_kernels(EQUAL).prefill == "stock"
    for geometry in (replace(EQUAL, form="latent"), UNEQUAL):
        kernels = layer.attention_kernels(geometry)
        assert kernels == Kernels("gac", "reference", "reference", False)
