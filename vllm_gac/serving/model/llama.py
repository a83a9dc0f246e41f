"""A model of any family with different dims in each layer, as a vLLM model.

Everything that does not depend on a layer's dims is vLLM's own Llama.
"""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
)

from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import HfConfig
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.quantized_checkpoint import check_weight_quantization
from vllm_gac.serving.model.fp8_linear import Fp8Linear, Quantized, normed
from vllm_gac.serving.model.fused_linears import is_eager_cuda, is_plain, warmup
from vllm_gac.serving.model.linear import (
    Shards,
    add_column_parallel,
    parallel_linear,
    project_gated,
)
from vllm_gac.serving.model.lora import fit_adapters
from vllm_gac.serving.model.self_attention import GacSelfAttention

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


GATE_AND_UP = ("gate_proj", "up_proj")


class GacMLP(nn.Module):
    """SwiGLU with the layer's own width. Gate and up are one GEMM unless one is low rank."""

    def __init__(
        self,
        layout: ModelLayout,
        layer: LayerLayout,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        hidden, width, bias = layout.hidden_size, layer.intermediate_size, layout.mlp_bias
        linears = {name: f"mlp.{name}" for name in GATE_AND_UP}
        ranks = {name: layer.ranks[full] for name, full in linears.items() if full in layer.ranks}
        self.is_fused = not ranks
        if self.is_fused:
            self.gate_up_proj = MergedColumnParallelLinear(
                hidden,
                [width, width],
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.gate_up_proj",
            )
            self.projection_shards: Shards = {
                name: ("gate_up_proj", shard) for shard, name in enumerate(GATE_AND_UP)
            }
        else:
            shapes = dict.fromkeys(GATE_AND_UP, (width, hidden))
            self.projection_shards = add_column_parallel(
                self, shapes, ranks, bias, quant_config, prefix, is_gated=True
            )
        down_rank = layer.ranks.get("mlp.down_proj")
        self.down_proj = parallel_linear(
            RowParallelLinear, width, hidden, down_rank, bias, quant_config, f"{prefix}.down_proj"
        )
        self.act_fn = SiluAndMul()
        self.is_plain = self.is_fused and is_plain(self.gate_up_proj)
        self.fp8_gate_up = Fp8Linear(self.gate_up_proj) if self.is_fused else None
        self.fp8_down = Fp8Linear(self.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        x, _ = self.down_proj(self._gated(x))
        return x

    def forward_fp8(self, x: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The same of an input in FP8; only where `fp8_gate_up` takes it."""
        assert self.fp8_gate_up is not None
        gate_up = self.fp8_gate_up.multiply(x, dtype)
        if not self.fp8_down.takes_quantized(gate_up):
            out, _ = self.down_proj(self.act_fn(gate_up))
            return out
        from vllm_gac.kernels.fp8_rows import gated

        return self.fp8_down.multiply(gated(gate_up), dtype)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [tokens, width]."""
        if not self.is_fused:
            return project_gated(self, GATE_AND_UP, x, self.act_fn)
        if self.is_plain and is_eager_cuda(x):
            from vllm_gac.kernels.swiglu import is_faster, swiglu_linear

            if is_faster(x, self.gate_up_proj.weight):
                return swiglu_linear(x, self.gate_up_proj.weight)
        gate_up, _ = self.gate_up_proj(x)
        return self.act_fn(gate_up)


class GacExperts(Qwen3MoeSparseMoeBlock):
    """The experts of a layer, which are as in the dense model: vLLM's own, which loads them."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        self.projection_shards: Shards = {}  # it fuses what it loads by itself
        self.fp8_gate_up: Fp8Linear | None = None


class GacDecoderLayer(nn.Module):
    """One decoder layer. The index in `prefix` selects its dims from the layout."""

    def __init__(
        self, layout: ModelLayout, config: HfConfig, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        layer = layout.layers[extract_layer_index(prefix)]
        quant_config = vllm_config.quant_config
        self.self_attn = GacSelfAttention(
            layout, layer, config, vllm_config.cache_config, quant_config, f"{prefix}.self_attn"
        )
        if layout.experts:
            self.mlp: GacMLP | GacExperts = GacExperts(vllm_config, f"{prefix}.mlp")
        else:
            self.mlp = GacMLP(layout, layer, quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(layout.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(layout.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pre-norm attention and MLP of tokens at `positions`.

        `residual` is what is to be added to `hidden_states` [tokens, hidden]; None in the first
        layer. Returns hidden states and residual for the next layer, both [tokens, hidden].
        """
        dtype = hidden_states.dtype
        fp8_qkv, fp8_gate_up = self.self_attn.fp8_qkv, self.mlp.fp8_gate_up
        if fp8_qkv is not None and fp8_qkv.takes_quantized(hidden_states):
            quantized, residual = normed(self.input_layernorm, hidden_states, residual)
            qkv = fp8_qkv.multiply(quantized, dtype)
            hidden_states = self.self_attn.forward_qkv(positions, qkv)
        else:
            if residual is None:
                residual = hidden_states
                hidden_states = self.input_layernorm(hidden_states)
            else:
                hidden_states, residual = self.input_layernorm(hidden_states, residual)
            hidden_states = self.self_attn(positions, hidden_states)
        if fp8_gate_up is not None and fp8_gate_up.takes_quantized(hidden_states):
            quantized, residual = normed(self.post_attention_layernorm, hidden_states, residual)
            return self.mlp.forward_fp8(quantized, dtype), residual
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


@support_torch_compile
class GacModel(LlamaModel):
    """vLLM's Llama model with our decoder layers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors into the linear layers that each layer has, fused or not."""
        mapper = WeightsMapper(orig_to_new_stacked=self._stacked_names())
        checked = check_weight_quantization(weights, dict(self.named_parameters()), mapper)
        return AutoWeightsLoader(self).load_weights(checked, mapper=mapper)

    def _stacked_names(self) -> dict[str, tuple[str, str | int]]:
        """Where each checkpoint linear is loaded: the fused linear and its shard, by name."""
        names: dict[str, tuple[str, str | int]] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PPMissingLayer):
                continue
            for module in ("self_attn", "mlp"):
                prefix = f"layers.{index}.{module}."
                for name, (fused, shard) in getattr(layer, module).projection_shards.items():
                    names[f"{prefix}{name}."] = (f"{prefix}{fused}.", shard)
        return names


class GacLlamaForCausalLM(LlamaForCausalLM):
    """Compressed model of any family: the class that `architectures` in config.json names."""

    @property
    def lora_manager(self) -> "LoRAModelManager":
        """vLLM's manager of LoRA adapters, which sets this after it has wrapped our linear layers.

        The setter makes the manager fit each adapter before it validates it.
        """
        return self._lora_manager

    @lora_manager.setter
    def lora_manager(self, manager: "LoRAModelManager") -> None:
        self._lora_manager = manager
        fit_adapters(manager, self.config)

    def _init_model(
        self,
        vllm_config: VllmConfig,
        prefix: str = "",
        layer_type: type[nn.Module] = GacDecoderLayer,
    ) -> GacModel:
        """The model with our layers. `layer_type`, which LlamaForCausalLM passes, is ignored."""
        config = GacConfig.of(vllm_config.model_config.hf_config)
        layer = functools.partial(GacDecoderLayer, config.served, config.checked)
        model = GacModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
        if model.do_not_compile:  # else Inductor decides about launches
            warmup(model, vllm_config.scheduler_config.max_num_batched_tokens)
        return model
