"""Which attention backend serves a layer, and the attention layer itself.

For vLLM a layer has num_kv_heads = value heads, head_size = the key numbers of one value head's
cache row and head_size_v = r_v; its cache page is exactly block_size times what is cached.
"""

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend

from vllm_gac.kernels.reference import CacheGeometry


def stock_backend_serves(geometry: CacheGeometry, latent: bool) -> bool:
    """Whether vLLM's own backend for this platform can be trusted with the layer.

    vLLM does not ask a backend about head_size_v, and its CPU backend does not check head sizes
    before it runs, so this is decided here.
    """
    if latent or geometry.key_heads != geometry.value_heads:
        return False
    if geometry.key_size != geometry.value_size:
        return False
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return geometry.key_size in CPUAttentionBackend.get_supported_head_sizes()
    return geometry.key_size % 8 == 0 and geometry.key_size <= 256


def gac_backend() -> type[AttentionBackend]:
    """Our backend for the other layers: kernels on a CUDA GPU, the torch reference elsewhere."""
    if current_platform.is_cuda():
        from vllm_gac.serving.attention_gpu import GacBackend

        return GacBackend
    from vllm_gac.serving.attention_reference import GacReferenceBackend

    return GacReferenceBackend


class GacAttention(Attention):
    """vLLM's attention layer for queries that are not as wide as a cache row's key part.

    That is so with latent keys, met at full head size, and with several key heads to a value head.
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

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [tokens, heads * query_size], key and value [tokens, heads * size], both packed.

        Returns [tokens, query heads * value_size].
        """
        g = self.geometry
        output = query.new_empty(query.shape[0], g.query_heads, g.value_size)
        query = query.view(-1, g.query_heads, g.query_size)
        key = key.view(-1, g.value_heads, g.key_width)
        value = value.view(-1, g.value_heads, g.value_size)
        # As in Attention.forward: two opaque ops, ordered by a dummy data dependency.
        name = _encode_layer_name(self.layer_name)
        written = torch.ops.vllm.unified_kv_cache_update(key, value, name)
        torch.ops.vllm.unified_attention_with_output(
            query, key, value, output, name, kv_cache_dummy_dep=written
        )
        return output.view(-1, g.query_heads * g.value_size)
