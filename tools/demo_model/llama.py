"""The Llama that `train.py` trains: transformers' LlamaForCausalLM with dropout.

Parameters have the names of a Hugging Face checkpoint, so the state_dict is the checkpoint.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from tools.demo_model.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Architecture:
    """Dims, named as in config.json. The defaults give 11.0 M parameters."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 128
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def hf_config(self) -> dict[str, object]:
        """The config.json of the trained model."""
        dims = asdict(self)
        theta = dims.pop("rope_theta")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dims,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": "bfloat16",
        }


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocab]; embeddings are tied."""

    def __init__(self, architecture: Architecture, dropout: float) -> None:
        super().__init__()
        self.model = Decoder(architecture, dropout)
        # Weights are normal with a standard deviation of 0.02. It is smaller for linears that write
        # to the residual stream, because their outputs add up.
        writes = 2 * architecture.num_hidden_layers
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_write = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(writes) if is_write else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits for the token after each of `ids`."""
        logits: Tensor = linear(self.model(ids), self.model.embed_tokens.weight)
        return logits


class Decoder(nn.Module):
    """Token ids [batch, length] to hidden states [batch, length, hidden_size]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, architecture: Architecture, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(architecture, dropout) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        pairs = architecture.head_dim // 2
        inv_freq = architecture.rope_theta ** (-torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(architecture.max_position_embeddings).float(), inv_freq)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Normalized hidden states, the input of the language model head."""
        rope = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.dropout(self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, rope)
        normalized: Tensor = self.norm(x)
        return normalized


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. Dropout applies to what each adds to the residual stream."""

    def __init__(self, architecture: Architecture, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.self_attn = Attention(architecture)
        self.post_attention_layernorm = nn.RMSNorm(
            architecture.hidden_size, architecture.rms_norm_eps
        )
        self.mlp = Mlp(architecture)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [batch, length, hidden_size] to the same."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rope))
        x = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return x


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        query_size = architecture.num_attention_heads * self.head_dim
        kv_size = architecture.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(architecture.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(architecture.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(architecture.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, architecture.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden states [batch, length, hidden_size] to the same."""
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = scaled_dot_product_attention(
            _rotate(query, rope), _rotate(key, rope), value, is_causal=True, enable_gqa=True
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, width = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [batch, length, hidden_size] to the same."""
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + head_dim/2) of x [batch, heads, length, head_dim] in fp32."""
    cos, sin = rope
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
