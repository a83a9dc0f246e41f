"""Which attention kernels serve a layer, and the attention layer itself.

vLLM sees num_kv_heads = value heads, head_size = the width of a cache row's key part, and
head_size_v = the value size. A cache page then holds exactly block_size rows for each value head.
"""

import functools
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.platforms import current_platform

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import GAC, STOCK, Kernels, select
from vllm_gac.gpu.profile import Dtype
from vllm_gac.gpu.profile_files import profile_of_gpu, read_profile
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention.prefill_kernels import installed_gpu
from vllm_gac.serving.config.engine_options import gac_backend_requested
from vllm_gac.serving.vllm_internals import attend, write_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gac.kernels.cache_write import CacheTarget

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

REFERENCE = "reference"


def kernels_of_gac_layer(geometry: CacheGeometry, vllm_config: "VllmConfig") -> Kernels:
    """The kernels that serve a layer of a gac model, as options say; see `attention_kernels`."""
    return attention_kernels(
        geometry,
        vllm_config.load_config.model_loader_extra_config.get("gpu"),
        gac_backend_requested(vllm_config),
        "fp8" if vllm_config.cache_config.cache_dtype.startswith("fp8") else "bf16",
    )


@functools.cache
def attention_kernels(
    heads: CacheGeometry, gpu: str | None = None, gac_only: bool = False, cache: Dtype = "bf16"
) -> Kernels:
    """The kernels that serve a layer of these heads on this machine.

    Only the ratios of the numbers of heads matter, so the whole layer and one rank's share give the
    same answer. `gpu` names the profile that decides; the default is the one shipped for this GPU,
    if there is one. With `gac_only` our backend serves every layer and every batch. Raises GacError
    if no prefill kernel takes the heads.
    """
    if not current_platform.is_cuda():
        if _cpu_attention_takes(heads):
            return Kernels(STOCK, STOCK, STOCK, measured=False)
        return Kernels(GAC, REFERENCE, REFERENCE, measured=False)
    name = current_platform.get_device_name()
    profile = read_profile(gpu) if gpu is not None else profile_of_gpu(name)
    kernels = select(heads, installed_gpu(), profile, gac_only, cache)
    if kernels is None:
        raise GacError(
            f"attention heads of ({heads.query_size}, {heads.value_size}): no prefill kernel "
            f"takes them on {name}; serve sizes up to 256"
        )
    return kernels


def announce(geometry: CacheGeometry, kernels: Kernels) -> None:
    """Log which kernels serve layers of these heads, once for each class of heads."""
    logger.info_once(
        "Attention of %d query heads, %s keys %d x %d, values %d x %d: decode %s, prefill %s (%s)",
        geometry.query_heads,
        geometry.form,
        geometry.key_heads,
        geometry.key_size,
        geometry.value_heads,
        geometry.value_size,
        kernels.decode,
        kernels.prefill,
        "measured" if kernels.measured else "by default",
        scope="local",  # on one tensor-parallel rank only
    )


def _cpu_attention_takes(heads: CacheGeometry) -> bool:
    """Whether vLLM's CPU backend serves the layer correctly.

    vLLM does not check head_size_v with a backend, and its CPU backend does not check head sizes
    before it runs.
    """
    if not heads.is_plain or heads.key_size != heads.value_size or not current_platform.is_cpu():
        return False
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return heads.key_size in CPUAttentionBackend.get_supported_head_sizes()


class GacAttention(Attention):
    """vLLM's attention layer, for query heads whose size is not the width of a row's key part.

    The two differ with latent keys, which are rebuilt to full head size, and where several key
    heads share a value head.
    """

    def __init__(self, geometry: CacheGeometry, **kwargs: object) -> None:
        super().__init__(
            num_heads=geometry.query_heads,
            head_size=geometry.key_width,
            num_kv_heads=geometry.value_heads,
            head_size_v=geometry.value_size,
            geometry=geometry,
            **kwargs,
        )
        self.geometry = geometry

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cached: bool = False
    ) -> torch.Tensor:
        """Cache this step's keys and values, unless they are `cached` already, then attend.

        Args:
            query: [tokens, query_heads * query_size].
            key: [tokens, key_heads * key_size].
            value: [tokens, value_heads * value_size].

        Returns:
            [tokens, query_heads * value_size].
        """
        geometry = self.geometry
        output = query.new_empty(query.shape[0], geometry.query_heads, geometry.value_size)
        query = query.view(-1, geometry.query_heads, geometry.query_size)
        key = key.view(-1, geometry.value_heads, geometry.key_width)
        value = value.view(-1, geometry.value_heads, geometry.value_size)
        written = None if cached else write_cache(key, value, self.layer_name)
        attend(query, key, value, output, self.layer_name, written)
        return output.view(-1, geometry.query_heads * geometry.value_size)

    def cache_target(self) -> "CacheTarget | None":
        """Where this step's keys and values go; None in a profiling run, which has no cache yet."""
        _, _, kv_cache, slots = get_attention_context(self.layer_name)
        if slots is None:
            return None
        target: CacheTarget = self.impl.cache_target(self, kv_cache, slots)
        return target
