"""A compressed model, made dense again as the format says, is what transformers' model computes.

Nothing of compression or of the reference model is used for it: heads are filled up with zeros,
pairs go back to the place of their frequency, and factors are multiplied.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dense_models import (
    config,
    fused,
    in_transformers,
    transformers_model,
    weights,
    write,
    write_text,
)
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.layout.dims import LINEARS
from vllm_gac.layout.families import FAMILIES
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

RAW = {family: config(model_type=family, head_dim=32) for family in FAMILIES}
WIDTH, HEADS, KV_HEADS, SIZE = 96, 4, 2, 32
TOKENS = torch.arange(2 * 90).view(2, 90) * 37 % 128
# Mixed pairs are left out: a frequency may have several pairs there, and has one in a dense head.
ALL = ("heads", "prune", "lowrank")
FORMS = {
    "selected pairs": PlanRequest(kv_ratio=0.6, methods=("heads",), key_form="rotary", key_group=1),
    "few pairs": PlanRequest(
        kv_ratio=0.35, methods=("heads",), key_form="rotary", value_group=2, align="none"
    ),
    "latent": PlanRequest(kv_ratio=0.6, methods=("heads",), key_form="latent", key_group=1),
    "one latent for two": PlanRequest(
        kv_ratio=0.6, methods=("heads",), key_form="latent", key_group=2
    ),
    "prune": PlanRequest(param_ratio=0.85, methods=("prune",)),
    "lowrank": PlanRequest(param_ratio=0.6, methods=("lowrank",)),
    "all": PlanRequest(param_ratio=0.7, kv_ratio=0.6, methods=ALL, key_form="latent"),
}
FORMS_OF = dict.fromkeys(FAMILIES, ("all",)) | {
    "qwen2": ("selected pairs", "all"),  # whose biases have pairs, too
    "ministral3": ("selected pairs", "one latent for two", "all"),
    "smollm3": ("selected pairs", "one latent for two", "all"),
    "phi3": tuple(name for name in FORMS if name != "few pairs"),
    "qwen3": ("selected pairs", "latent", "prune", "lowrank", "all"),
    "qwen3_moe": ("selected pairs", "few pairs", "latent"),
}


@pytest.mark.parametrize(
    ("family", "form"), [(family, form) for family, forms in FORMS_OF.items() for form in forms]
)
def test_every_form_equals_transformers(family: str, form: str, tmp_path: Path) -> None:
    raw = RAW[family]
    model, text = write(tmp_path / "dense", raw), write_text(tmp_path / "text.txt")
    few = CompressRequest(max_tokens=1024, sequence_length=128)
    compress(model, tmp_path / "out", FORMS[form], few, calibration=[text], progress=False)
    small = open_checkpoint(tmp_path / "out")
    assert small.layout.layers != open_checkpoint(model).layout.layers
    theirs = transformers_model(raw)
    with torch.inference_mode(), small.reader() as read:
        dense = densified(small, read)
        dense = fused(dense) if FAMILIES[family].fused else dense
        theirs.load_state_dict(in_transformers(dense))
        if small.layout.qk_norm:
            _set_norms(theirs, small, read)
        got, expected = logits(reference(small), read, TOKENS), theirs(TOKENS).logits
    assert got.std() > 0.1
    torch.testing.assert_close(got.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=2e-4)


def densified(model: Checkpoint, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a dense model that computes the same, by a Llama's names."""
    dense = {name: read(name) for name in model.layout.tensors() if not name.startswith("model.l")}
    for index in range(len(model.layout.layers)):
        prefix = f"model.layers.{index}."
        for norm in ("input", "post_attention"):
            name = f"{prefix}{norm}_layernorm.weight"
            dense[name] = read(name)
        for name, weight in _linears(model, read, index).items():
            if model.layout.qkv_bias and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                weight, dense[f"{prefix}{name}.bias"] = weight[:, :-1], weight[:, -1]
            dense[f"{prefix}{name}.weight"] = weight
    return dense


def _linears(
    model: Checkpoint, read: Callable[[str], torch.Tensor], index: int
) -> dict[str, torch.Tensor]:
    """The dense weights of a layer, with a bias of q, k and v as their last column."""
    layer, prefix = model.layout.layers[index], f"model.layers.{index}."
    tensors = [name.removeprefix(prefix) for name, _ in model.layout.layer_tensors(index)]
    made = {}
    for name in LINEARS:
        stored = f"{prefix}{name}"
        if name in layer.ranks:
            made[name] = read(f"{stored}.B.weight") @ read(f"{stored}.A.weight")
        elif f"{name}.weight" in tensors:
            made[name] = read(f"{stored}.weight")
        for bias in {f"{name}.bias", f"{name}.B.bias"}.intersection(tensors):
            made[name] = torch.cat([made[name], read(prefix + bias)[:, None]], 1)
    q, k, v, o = (f"self_attn.{x}_proj" for x in "qkvo")
    keys = made[k].view(layer.key.heads, -1, made[k].shape[-1])
    if model.layout.qk_norm:
        made |= {
            f"self_attn.{x}_norm": weights(RAW[model.config.model_type])[
                f"{prefix}self_attn.{x}_norm.weight"
            ]
            for x in "qk"
        }
    if layer.key.form == "latent":
        up = read(f"{prefix}self_attn.k_up_proj.weight")
        if model.layout.qk_norm:
            up = up / made["self_attn.k_norm"][:, None]
            product = up.transpose(1, 2) @ up
            torch.testing.assert_close(product, torch.eye(layer.key.size).expand_as(product))
        made[k] = (up @ keys).flatten(0, 1)
    elif layer.key.rope_table:
        table = read(f"{prefix}self_attn.rope_inv_freq").expand(KV_HEADS, -1)
        queries = made[q].view(HEADS, -1, made[q].shape[-1])
        made[k] = torch.cat([_unpruned(keys[h], table[h]) for h in range(KV_HEADS)])
        shared = HEADS // KV_HEADS
        made[q] = torch.cat([_unpruned(queries[h], table[h // shared]) for h in range(HEADS)])
    values = made[v].view(layer.value.heads, layer.value.size, -1)
    values = values.repeat_interleave(KV_HEADS // layer.value.heads, 0)
    made[v] = _padded(values, 1, SIZE).flatten(0, 1)
    made[o] = _padded(made[o].view(-1, HEADS, layer.value.size), 2, SIZE).flatten(1)
    if model.layout.experts:
        experts = [name.removesuffix(".weight") for name in tensors if name.startswith("mlp.")]
        return made | {name: read(f"{prefix}{name}.weight") for name in experts}
    for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
        made[f"mlp.{name}_proj"] = _padded(made[f"mlp.{name}_proj"], axis, WIDTH)
    return made


def _set_norms(theirs: Any, model: Checkpoint, read: Callable[[str], torch.Tensor]) -> None:
    """Give each head its own norm, with 0 for pairs that it has lost: a dense model has one."""
    for index, layer in enumerate(model.layout.layers):
        if not layer.key.rope_table:
            continue
        prefix = f"model.layers.{index}.self_attn."
        table = read(f"{prefix}rope_inv_freq").expand(KV_HEADS, -1)
        for name, heads in (("q_norm", HEADS), ("k_norm", KV_HEADS)):
            stored = read(f"{prefix}{name}.weight").view(KV_HEADS, -1, 1)
            norms = [_unpruned(stored[h], table[h])[:, 0] for h in range(KV_HEADS)]
            weight = torch.stack(norms).repeat_interleave(heads // KV_HEADS, 0)
            norm = getattr(theirs.model.layers[index].self_attn, name)
            norm.weight = torch.nn.Parameter(weight)


def _unpruned(head: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """`head` [size, hidden] with each pair where a whole head has its frequency.

    A head that is normed before RoPE has all of its rows; those of lost pairs come last.
    """
    own = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    whole, pairs = head.new_zeros(SIZE, head.shape[1]), len(head) // 2
    kept = frequencies[frequencies > 0]
    places = [int((own - frequency).abs().argmin()) for frequency in kept]
    if not places:  # a layer without RoPE, where any will do
        places, kept = list(range(pairs)), own[:pairs]
    torch.testing.assert_close(own[places], kept, rtol=1e-6, atol=0)
    if pairs == SIZE // 2:
        places += [place for place in range(pairs) if place not in places]
    for pair, place in enumerate(places):
        whole[place], whole[place + SIZE // 2] = head[pair], head[pair + pairs]
    return whole


def _padded(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)
