"""Self-attention of a compressed layer: projections, RoPE with its own table, attention."""

from typing import Any

import torch
from torch import nn
from vllm.config import CacheConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend

from vllm_gac.gpu.attention_choice import STOCK
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.qk_norm import norm_heads, norm_latents
from vllm_gac.layout.rope import cos_sin, inverse_frequencies, of_queries, rotate
from vllm_gac.layout.schema import HfConfig, RopeParameters
from vllm_gac.serving.attention.layer import GacAttention, announce, kernels_of_gac_layer
from vllm_gac.serving.loading.quantized_checkpoint import is_scaled_by_head
from vllm_gac.serving.model.fp8_linear import Fp8Linear
from vllm_gac.serving.model.linear import Shards, add_column_parallel, parallel_linear, project

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class GacSelfAttention(nn.Module):
    """Self-attention of `layer`. Shapes are those of one tensor-parallel rank."""

    rope_inv_freq: torch.Tensor  # fp32 [key heads or 1, pairs]

    def __init__(
        self,
        layout: ModelLayout,
        layer: LayerLayout,
        config: HfConfig,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        self.layout, self.layer, self.quant_config = layout, layer, quant_config
        self.rope = config.rope
        self.geometry = CacheGeometry.of(layout, layer, tp)
        self.is_latent = self.geometry.is_latent
        self.projection_shards = self._add_projections(prefix)
        self._add_frequencies(config.rope)
        if layout.qk_norm:
            eps = config.rms_norm_eps
            self.q_norm = HeadNorm(layout, layer, self.geometry, eps)
            self.k_norm = (
                LatentNorm(layout.head_dim, layer.key.size, eps)
                if self.is_latent
                else HeadNorm(layout, layer, self.geometry, eps)
            )
        if self.is_latent:
            rebuilt = layout.kv_heads_per(layer.key) * layout.head_dim
            self.k_up_proj = KeyUpProjection(self.geometry.key_heads, rebuilt, layer.key.size)
        out_size, in_size = layout.linear_shape(layer, "self_attn.o_proj")
        self.o_proj = parallel_linear(
            RowParallelLinear,
            in_size,
            out_size,
            layer.ranks.get("self_attn.o_proj"),
            layout.output_bias,
            quant_config,
            f"{prefix}.o_proj",
        )
        self.fp8_qkv = Fp8Linear(self.qkv_proj) if self.is_fused else None
        self.fp8_o = Fp8Linear(self.o_proj)
        self.attn = self._attention(cache_config, f"{prefix}.attn")
        if is_scaled_by_head(getattr(quant_config, "kv_cache_scheme", None)):
            self._add_head_scales()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions [tokens], hidden_states [tokens, hidden] -> [tokens, hidden]."""
        return self._attend(positions, *self._project(hidden_states))

    def forward_qkv(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """The same of queries, keys and values beside each other, [tokens, out] of `qkv_proj`."""
        return self._attend(positions, *self._split(qkv))

    def _attend(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self.layout.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if q.is_cuda and not torch.compiler.is_compiling():
            attended = self._rotate_and_attend(positions, q, k, v)
        else:
            q, k = self._rotate(positions, q, k)
            attended = self.attn(q, k, v)
        if self.fp8_o.takes_quantized(attended):
            from vllm_gac.kernels.fp8_rows import quantized

            return self.fp8_o.multiply(quantized(attended), attended.dtype)
        output, _ = self.o_proj(attended)
        return output

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self.is_fused:
            q, k, v = project(self, PROJECTIONS, hidden_states)
            return q, k, v
        qkv, _ = self.qkv_proj(hidden_states)
        return self._split(qkv)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        geometry = self.geometry
        query_size, key_size = self.layout.projected_sizes(self.layer)
        sizes = [
            geometry.query_heads * query_size,
            geometry.key_heads * key_size,
            geometry.value_heads * geometry.value_size,
        ]
        q, k, v = qkv.split(sizes, dim=-1)
        return q, k, v

    def _rotate(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply RoPE to q and k. Latent keys are rotated later, when attention rebuilds them.

        A query head uses the frequencies of its key head.
        """
        geometry = self.geometry
        cos, sin = cos_sin(positions, self.rope_inv_freq)
        if not self.is_latent:
            k = rotate(k.reshape(-1, geometry.key_heads, geometry.key_size), cos, sin).flatten(1)
        tables = cos.shape[1]
        cos, sin = of_queries(positions, cos, sin, self.rope)
        q = q.reshape(-1, tables, geometry.query_heads // tables, geometry.query_size)
        return rotate(q, cos.unsqueeze(2), sin.unsqueeze(2)).flatten(1), k

    def _rotate_and_attend(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Rotate and attend on a GPU. One kernel rotates and, for our backend, fills the cache."""
        from vllm_gac.kernels.rotate_and_cache import rotate_and_cache

        cache = self.attn.cache_target() if isinstance(self.attn, GacAttention) else None
        q, k = rotate_and_cache(
            positions, self.rope_inv_freq, q, k, v, self.geometry, self.is_latent, cache, self.rope
        )
        attended: torch.Tensor
        attended = self.attn(q, k, v) if cache is None else self.attn(q, k, v, cached=True)
        return attended

    def _add_projections(self, prefix: str) -> Shards:
        """Build the q, k and v projections, as one GEMM unless one of them is low rank.

        With --fully-sharded-loras, vLLM has a class that adapts q, k and v as one GEMM only for
        equal heads. Others stay separate: vLLM leaves linear layers unadapted for which it has
        none.
        """
        layout, layer, geometry = self.layout, self.layer, self.geometry
        linears = {name: f"self_attn.{name}" for name in PROJECTIONS}
        shapes = {name: layout.linear_shape(layer, full) for name, full in linears.items()}
        ranks = {name: layer.ranks[full] for name, full in linears.items() if full in layer.ranks}
        bias = layout.qkv_bias
        query_size, key_size = layout.projected_sizes(layer)
        equal_heads = geometry.key_heads == geometry.value_heads
        is_stock = equal_heads and query_size == key_size == geometry.value_size
        lora = get_current_vllm_config().lora_config
        self.is_fused = not ranks and (is_stock or lora is None or not lora.fully_sharded_loras)
        if not self.is_fused:
            return add_column_parallel(self, shapes, ranks, bias, self.quant_config, prefix)
        fused: dict[str, Any] = {
            "bias": bias,
            "quant_config": self.quant_config,
            "prefix": f"{prefix}.qkv_proj",
        }
        if is_stock:
            self.qkv_proj = QKVParallelLinear(
                layout.hidden_size, key_size, layer.query_heads, layer.key.heads, **fused
            )
            return {name: ("qkv_proj", name[0]) for name in PROJECTIONS}
        self.qkv_proj = MergedColumnParallelLinear(
            layout.hidden_size, [out_size for out_size, _ in shapes.values()], **fused
        )
        return {name: ("qkv_proj", shard) for shard, name in enumerate(PROJECTIONS)}

    def _add_frequencies(self, rope: RopeParameters) -> None:
        """Add the buffer `rope_inv_freq`, fp32 [key heads or 1, pairs].

        It is loaded if the checkpoint has a table for this layer. Otherwise it has one row for all
        heads, computed from config.json.
        """
        if not self.layer.key.rope_table:
            frequencies = inverse_frequencies(rope, self.layout.head_dim) * self.layer.has_rope
            frequencies = frequencies.to(torch.get_default_device())
            self.register_buffer("rope_inv_freq", frequencies[None, :], persistent=False)
            return
        shape = (self.geometry.key_heads, self.layer.key.size // 2)
        self.register_buffer("rope_inv_freq", torch.empty(shape, dtype=torch.float32))
        set_weight_attrs(self.rope_inv_freq, {"weight_loader": load_rank_heads})

    def _add_head_scales(self) -> None:
        """Add parameters for the cache's scales of each head.

        Those that vLLM adds are for as many key heads as value heads, and as many in all layers.
        Its attention takes one scale for the queries of each value head.
        """
        geometry = self.geometry
        value_heads = geometry.value_heads
        for kind, heads in {"q": value_heads, "k": geometry.key_heads, "v": value_heads}.items():
            scales = nn.Parameter(torch.ones(heads, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(scales, {"weight_loader": load_head_scales})
            setattr(self.attn, f"{kind}_scale", scales)

    def _attention(self, cache_config: CacheConfig | None, prefix: str) -> nn.Module:
        geometry = self.geometry
        common: dict[str, Any] = {
            "scale": self.layout.score_scale(self.layer),
            "cache_config": cache_config,
            "quant_config": self.quant_config,
            "prefix": prefix,
        }
        kernels = kernels_of_gac_layer(geometry, get_current_vllm_config())
        announce(geometry, kernels)
        if kernels.backend == STOCK:
            return Attention(
                geometry.query_heads,
                geometry.key_size,
                num_kv_heads=geometry.key_heads,
                **common,
            )
        common |= {"attn_backend": gac_backend(), "prefill": kernels.prefill}
        if self.is_latent:
            common["latent"] = LatentKeys(self.k_up_proj.weight, self.rope_inv_freq)
        return GacAttention(geometry, **common)


def gac_backend() -> type[AttentionBackend]:
    """Our backend, for layers that vLLM's own does not serve.

    Kernels on a CUDA GPU, the torch reference elsewhere.
    """
    if current_platform.is_cuda():
        from vllm_gac.serving.attention.gpu_backend import GacBackend

        return GacBackend
    from vllm_gac.serving.attention.reference_backend import GacReferenceBackend

    return GacReferenceBackend


class HeadNorm(nn.Module):
    """RMSNorm of each query head or key head of this rank.

    `weight` is [head_dim], or [key heads, key size] where each key head keeps pairs of its own.
    """

    def __init__(
        self, layout: ModelLayout, layer: LayerLayout, geometry: CacheGeometry, eps: float
    ) -> None:
        super().__init__()
        self.head_dim, self.eps = layout.head_dim, eps
        shape = layout.norm_shape(layer)
        shared = len(shape) == 1
        norm_shape = shape if shared else (geometry.key_heads, geometry.key_size)
        self.weight = nn.Parameter(torch.empty(norm_shape), requires_grad=False)
        if not shared:
            set_weight_attrs(self.weight, {"weight_loader": load_rank_heads})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads * head_dim] -> [tokens, heads * head_dim or key size]."""
        heads = x.reshape(*x.shape[:-1], -1, self.head_dim)
        return norm_heads(heads, self.weight, self.eps).flatten(-2)


class LatentNorm(nn.Module):
    """RMSNorm of the latent of each key head of this rank."""

    def __init__(self, head_dim: int, size: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.size, self.eps = head_dim, size, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads * size] -> the same."""
        latents = x.reshape(*x.shape[:-1], -1, self.size)
        return norm_latents(latents, self.head_dim, self.eps).flatten(-2)


class KeyUpProjection(nn.Module):
    """The up factors of latent keys, which attention applies.

    `weight` is [key heads, heads per latent * head_dim, rank].
    """

    def __init__(self, heads: int, out_size: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, out_size, rank), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": load_rank_heads})


def load_rank_heads(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Weight loader for a tensor [heads, ...]: copies this rank's heads, or the only one."""
    heads = param.shape[0]
    if loaded.shape[0] > 1:
        loaded = loaded.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
    param.data.copy_(loaded)


def load_head_scales(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Weight loader for scales [heads]: copies this rank's of `loaded`, [heads of all ranks, 1, 1].

    Of several for each head, which only queries have, the largest counts, as in vLLM.
    """
    heads = param.shape[0] * get_tensor_model_parallel_world_size()
    load_rank_heads(param, loaded.reshape(heads, -1).amax(1))
