"""Whether our decode kernel can run a layer on a GPU: a tile has to fit into its shared memory."""

from collections.abc import Iterable
from dataclasses import replace

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import MAX_HEAD_SIZE
from vllm_gac.kernels.decode.tiling import tiling_of
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.rounding import round_up

# The largest multiple that padding at load time gives head sizes.
_PADDED = 16


def fits_decode_kernel(
    layout: ModelLayout,
    layer: LayerLayout,
    capability: tuple[int, int] = HOPPER,
    itemsizes: Iterable[int] = (1, 2),
) -> bool:
    """Whether our kernels can run the attention of `layer`: `check_layer`, and prefill."""
    if max(layout.query_size(layer), round_up(layer.value.size, _PADDED)) > MAX_HEAD_SIZE:
        return False
    try:
        check_layer(layout, layer, capability, itemsizes=itemsizes)
    except GacError:
        return False
    return True


def check_layer(
    layout: ModelLayout,
    layer: LayerLayout,
    capability: tuple[int, int] = HOPPER,
    queries: int = 1,
    itemsizes: Iterable[int] = (1, 2),
) -> None:
    """Raise GacError unless a tiling of the decode kernel fits into shared memory.

    Args:
        layout: The whole model.
        layer: One of its layers.
        capability: Compute capability of the GPU.
        queries: Query tokens of a decoding request, drafted tokens included.
        itemsizes: Bytes of a cached number, one for each cache dtype to check.
    """
    geometry = replace(
        CacheGeometry.of(layout, layer),
        key_size=round_up(layer.key.size, _PADDED),
        value_size=round_up(layer.value.size, _PADDED),
    )
    group = layout.kv_heads_per(layer.key) if geometry.is_latent else 0
    check_heads(geometry, group, capability, queries, itemsizes)


def check_heads(
    geometry: CacheGeometry,
    group: int,
    capability: tuple[int, int],
    queries: int,
    itemsizes: Iterable[int],
) -> None:
    """Check heads as they are likewise; `group` KV heads share a latent, 0 if keys are rotary."""
    for itemsize in itemsizes:
        tiling_of(geometry, queries, itemsize, group, capability)
