"""Llamas whose classes have the module paths of other tools in a pickle. The models can run.

The tools need not be installed, because a pickle contains only the names of their classes.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

TRANSFORMERS_LLAMA = "transformers.models.llama.modeling_llama"
TRANSFORMERS_MISTRAL = "transformers.models.mistral.modeling_mistral"
SVD_LLAMA, SVD_MISTRAL = "component.svd_llama", "component.svd_mistral"
LLM_PRUNER = "LLMPruner.models.hf_llama.modeling_llama"
CONFIGS = {
    "LlamaConfig": "transformers.models.llama.configuration_llama",
    "MistralConfig": "transformers.models.mistral.configuration_mistral",
}


def at(module: str, base: type, name: str | None = None) -> type:
    """A subclass of `base` in `module`. Within `importable`, pickle finds it there."""
    key = module, name or base.__name__
    if key not in _CLASSES:
        _CLASSES[key] = type(key[1], (base,), {"__module__": module})
    return _CLASSES[key]


_CLASSES: dict[tuple[str, str], type] = {}


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Put modules with those paths into `sys.modules`, in place of those that were there."""
    paths = {
        ".".join(module.split(".")[: depth + 1])
        for module, _ in _CLASSES
        for depth in range(module.count(".") + 1)
    }
    before = {path: sys.modules.get(path) for path in paths}
    sys.modules.update({path: ModuleType(path) for path in paths})
    for (module, name), cls in _CLASSES.items():
        setattr(sys.modules[module], name, cls)
    try:
        yield
    finally:
        for path, module in before.items():
            del sys.modules[path]
            if module is not None:
                sys.modules[path] = module


class Plain:
    """An object with attributes: a config, a tokenizer."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(size) / 4)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (
            wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        )


class LlamaRotaryEmbedding(nn.Module):
    """As in transformers 4.28: the state dict has the frequencies, but not the cosines."""

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, size, 2).float() / size))
        angles = torch.outer(torch.arange(256).float(), self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", angles.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", angles.sin()[None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [batch, heads, tokens, size]."""
        first, second = x.chunk(2, dim=-1)
        tokens = x.shape[2]
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos_cached[:, :, :tokens] + turned * self.sin_cached[:, :, :tokens]


def linear(out_size: int, in_size: int) -> nn.Linear:
    layer = nn.Linear(in_size, out_size, bias=False)
    layer.weight.data = 2 * torch.randn(out_size, in_size) * in_size**-0.5
    return layer


def factors(owner: nn.Module, name: str, out_size: int, in_size: int, ratio: float) -> None:
    """Add `name`_u_proj and `name`_v_proj with SVD-LLM's rank.

    As in SVD-LLM, the attributes of both modules have the rank of q_proj instead.
    """
    rank = int(out_size * in_size * ratio / (out_size + in_size))
    stated = int(in_size * ratio / 2)
    up, down = nn.Linear(stated, out_size, bias=False), nn.Linear(in_size, stated, bias=False)
    up.weight.data = torch.randn(out_size, rank) * rank**-0.5
    down.weight.data = 2 * torch.randn(rank, in_size) * in_size**-0.5
    setattr(owner, f"{name}_u_proj", up)
    setattr(owner, f"{name}_v_proj", down)


class Attention(nn.Module):
    """Attention, whole or factorized. The weights give the number of heads."""

    def __init__(self, config: Any, layer: dict[str, Any], rotary: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads  # pruning does not change this
        self.head_dim = layer["head_dim"]
        hidden = layer["hidden"]
        heads, kv_heads = layer["heads"], layer["kv_heads"]
        for name, out_size, in_size in (
            ("q", heads * self.head_dim, hidden),
            ("k", kv_heads * self.head_dim, hidden),
            ("v", kv_heads * self.head_dim, hidden),
            ("o", hidden, heads * self.head_dim),
        ):
            if layer["ratio"] is None or name in layer["whole"]:
                setattr(self, f"{name}_proj", linear(out_size, in_size))
            else:
                factors(self, name, out_size, in_size, layer["ratio"])
        self.rotary_emb = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape

        def heads(name: str) -> torch.Tensor:
            flat = project(self, name, x)
            return flat.view(batch, tokens, -1, self.head_dim).transpose(1, 2)

        query, key = self.rotary_emb(heads("q")), self.rotary_emb(heads("k"))
        value = heads("v")
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~past, -math.inf).softmax(-1)
        return project(self, "o", (weights @ value).transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = layer["width"], layer["hidden"]
        for name, out_size, in_size in (
            ("gate", width, hidden),
            ("up", width, hidden),
            ("down", hidden, width),
        ):
            if layer["ratio"] is None or name in layer["whole"]:
                setattr(self, f"{name}_proj", linear(out_size, in_size))
            else:
                factors(self, name, out_size, in_size, layer["ratio"])
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self.act_fn(project(self, "gate", x)) * project(self, "up", x)
        return project(self, "down", gated)


def project(owner: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    if hasattr(owner, f"{name}_proj"):
        return getattr(owner, f"{name}_proj")(x)
    return getattr(owner, f"{name}_u_proj")(getattr(owner, f"{name}_v_proj")(x))


class LlamaDecoderLayer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))


def model(
    home: str,
    config: Any,
    layers: list[dict[str, Any]],
    *,
    attention: type,
    mlp: type,
    rotary: type,
    base: float = 10000.0,
) -> nn.Module:
    """A random, reproducible model. Its outer classes have the paths of `home`."""
    torch.manual_seed(0)
    kind = "Mistral" if "mistral" in home else "Llama"
    names = {
        cls: cls.__name__.replace("Llama", kind)
        for cls in (LlamaForCausalLM, LlamaModel, LlamaDecoderLayer, LlamaRMSNorm)
    }
    causal_lm, decoder, layer_class, norm = (at(home, cls, name) for cls, name in names.items())
    hidden = layers[0]["hidden"]
    whole, inner = causal_lm(), decoder()
    inner.embed_tokens = nn.Embedding(config.vocab_size, hidden)
    built = []
    for dims in layers:
        layer = layer_class()
        layer.self_attn = attention(config, dims, rotary(dims["head_dim"], base))
        layer.mlp = mlp(dims)
        layer.input_layernorm = norm(hidden, config.rms_norm_eps)
        layer.post_attention_layernorm = norm(hidden, config.rms_norm_eps)
        built.append(layer)
    inner.layers = nn.ModuleList(built)
    inner.norm = norm(hidden, config.rms_norm_eps)
    whole.config, whole.model = config, inner
    whole.lm_head = linear(config.vocab_size, hidden)
    whole.seqlen = 2048
    return whole.eval()


def llama_config(kind: str = "LlamaConfig", **changes: Any) -> Any:
    """A config object of transformers, with the fields that it has besides the dims."""
    attributes = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": torch.float16,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "id2label": {0: "LABEL_0"},
        "_name_or_path": "jeffwan/llama-7b-hf",
        "transformers_version": "4.35.2",
    }
    return at(CONFIGS[kind], Plain, kind)(**attributes | changes)


def dims(**changes: Any) -> dict[str, Any]:
    """The dims of one dense layer of that config."""
    whole = {"hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "width": 96}
    return whole | {"ratio": None, "whole": ()} | changes


def tokenizer(text: str) -> Any:
    """A slow LlamaTokenizer whose sentencepiece model is `text`."""
    token = at("tokenizers", Plain, "AddedToken")
    attributes = {
        "_bos_token": token(content="<s>", special=True),
        "_eos_token": "</s>",
        "_pad_token": None,
        "sp_model": None,
        "sp_model_proto": text.encode("latin1"),
        "model_max_length": 1000000000000000019884624838656,
        "add_bos_token": True,
        "unique_no_split_tokens": {"<s>", "</s>"},
        "init_kwargs": {"legacy": False, "unk_token": token(content="<unk>")},
    }
    return at("transformers.models.llama.tokenization_llama", Plain, "LlamaTokenizer")(**attributes)


def save(path: Any, value: Any, **options: Any) -> None:
    """Call torch.save as these tools do."""
    with importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the legacy format misses the source code
        torch.save(value, path, **options)
