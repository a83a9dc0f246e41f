"""A reader written from docs/format.md, without our layout, computes what ours does.

It works token by token and head by head, as the page describes it.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.test_docs import example
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.compression.reference_model import logits, reference

TOKENS = [7, 300, 41, 41, 9, 511]
EPS = 1e-6


class Reader:
    """The model of one config.json and its tensors by name."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.gac, self.tensors = config, config["gac"], tensors

    def logits(self, tokens: list[int]) -> torch.Tensor:
        states = [self.tensors["model.embed_tokens.weight"][token] for token in tokens]
        for index in range(len(self.gac["layers"])):
            states = self._layer(index, states)
        norm, unembedding = self.tensors["model.norm.weight"], "model.embed_tokens.weight"
        if not self.config["tie_word_embeddings"]:
            unembedding = "lm_head.weight"
        return torch.stack([self.tensors[unembedding] @ _norm(x, norm) for x in states])

    def _layer(self, index: int, states: list[torch.Tensor]) -> list[torch.Tensor]:
        attended = self._attention(index, states)
        states = [x + a for x, a in zip(states, attended, strict=True)]
        return [x + self._mlp(index, x) for x in states]

    def _attention(self, index: int, states: list[torch.Tensor]) -> list[torch.Tensor]:
        layer = self.gac["layers"][index]
        query_heads = layer.get("query_heads") or self.config["num_attention_heads"]
        key_heads, value_heads = layer["key"]["heads"], layer["value"]["heads"]
        norm = self._of(index, "input_layernorm.weight")
        normed = [_norm(x, norm) for x in states]
        cached = [self._keys(index, position, x) for position, x in enumerate(normed)]
        values = [self._linear(index, "self_attn.v_proj", x) for x in normed]
        outputs = []
        for position, x in enumerate(normed):
            queries = self._linear(index, "self_attn.q_proj", x).chunk(query_heads)
            heads = []
            for number, query in enumerate(queries):
                met = number // (query_heads // len(cached[0]))
                own_key = number // (query_heads // key_heads)
                turned = self._turned(index, own_key, position, query)
                scores = torch.stack([turned @ keys[met] for keys in cached[: position + 1]])
                weights = (self.gac["softmax_scale"] * scores).softmax(0)
                own_value = own_key // (key_heads // value_heads)
                seen = [v.chunk(value_heads)[own_value] for v in values[: position + 1]]
                heads.append(weights @ torch.stack(seen))
            outputs.append(self._linear(index, "self_attn.o_proj", torch.cat(heads)))
        return outputs

    def _keys(self, index: int, position: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Rotated keys of a token; those of latents rebuilt."""
        key = self.gac["layers"][index]["key"]
        keys = list(self._linear(index, "self_attn.k_proj", x).chunk(key["heads"]))
        if key["form"] == "latent":
            up, size = self._of(index, "self_attn.k_up_proj.weight"), self.gac["head_dim"]
            group = self.config["num_key_value_heads"] // key["heads"]
            keys = [
                up[latent, head * size : (head + 1) * size] @ keys[latent]
                for latent in range(key["heads"])
                for head in range(group)
            ]
        return [self._turned(index, head, position, k) for head, k in enumerate(keys)]

    def _turned(self, index: int, head: int, position: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{index}.self_attn.rope_inv_freq"
        if name in self.tensors:
            table = self.tensors[name]
            frequencies = table[head if len(table) > 1 else 0].tolist()
        else:
            size, base = self.gac["head_dim"], self.config["rope_parameters"]["rope_theta"]
            frequencies = [base ** (-2 * pair / size) for pair in range(size // 2)]
        turned, half = x.clone(), len(frequencies)
        for pair, frequency in enumerate(frequencies):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            turned[pair] = x[pair] * cos - x[pair + half] * sin
            turned[pair + half] = x[pair + half] * cos + x[pair] * sin
        return turned

    def _mlp(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = _norm(x, self._of(index, "post_attention_layernorm.weight"))
        gate = torch.nn.functional.silu(self._linear(index, "mlp.gate_proj", x))
        return self._linear(index, "mlp.down_proj", gate * self._linear(index, "mlp.up_proj", x))

    def _linear(self, index: int, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = self.gac["layers"][index]
        if name in layer.get("ranks", {}):
            x, name = self._of(index, f"{name}.A.weight") @ x, f"{name}.B"
        output = self._of(index, f"{name}.weight") @ x
        if f"model.layers.{index}.{name}.bias" in self.tensors:
            output = output + self._of(index, f"{name}.bias")
        return output

    def _of(self, index: int, name: str) -> torch.Tensor:
        return self.tensors[f"model.layers.{index}.{name}"]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean() + EPS).sqrt()


@pytest.mark.parametrize("biased", [False, True])
def test_the_page_says_enough_to_compute_the_model(tmp_path: Path, biased: bool) -> None:
    config = example() | {"attention_bias": biased, "mlp_bias": biased, "rms_norm_eps": EPS}
    config["gac"]["source"] = {}  # another tool's tables may have any frequencies
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"nothing": torch.zeros(1)}, tmp_path / "model.safetensors")
    shapes = open_checkpoint(tmp_path).layout.tensors()
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.rand(shape, generator=random)
        if name.endswith("rope_inv_freq")
        else torch.randn(shape, generator=random) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert not list(faults(checkpoint, finite=True))
    with checkpoint.reader() as read:
        ours = logits(reference(checkpoint), read, torch.tensor([TOKENS]))[0]
    torch.testing.assert_close(Reader(config, tensors).logits(TOKENS), ours, rtol=1e-4, atol=1e-5)
