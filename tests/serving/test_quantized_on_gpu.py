"""On a GPU: quantized models with scaled FP8 caches, and latent keys of a Qwen3 in FP8 caches.

What is expected is computed on the CPU: the reference model, in fp32, of the rounded weights. Its
keys and values are exact.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.agreement import PROMPTS, prompt_logprobs
from tests.serving.engines import (
    GPU_OPTIONS,
    cache_scales,
    described,
    in_engine_process,
    linear_methods,
    scored_prompts,
)
from tests.serving.models import ALIGNED, QUERY_HEADS, layer, write_model
from tests.serving.quantized import write_modelopt_fp8, write_quantized
from tests.support.stored_models import logits_of

# Dense, selected pairs, fewer value heads, low rank; and latents, one for each KV head or for two.
LLAMA = [*ALIGNED, layer(("latent", 2, 64), (2, 64), 512)]
QWEN3 = [
    layer(("latent", 4, 32), (4, 64), 512),
    layer(("latent", 4, 48), (2, 64), 384, {"self_attn.q_proj": 96}),
    layer(("latent", 4, 64), (4, 32), 512, {"self_attn.k_proj": 96}),
    layer(("rotary", 4, 48), (4, 48), 512),
    layer(("rotary", 4, 64), (4, 64), 512),
]
PACKED = "CompressedTensorsLinearMethod"
DENSE = [layer(("rotary", 4, 64), (4, 64), 512)] * 3
# The largest number of a head whose mean square is 1 is below 8; 448 is FP8's largest.
SCALE = 8 / 448
# What keys and values are multiplied by, so that an FP8 cache without scales loses both: keys fall
# below its smallest number, values exceed its largest.
SMALL_KEYS, LARGE_VALUES = 2.0**-10, 2.0**12
# Of the spread of logprobs. bf16 alone, and what FP8 adds.
BF16_NOISE, FP8_NOISE = 0.05, 0.2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "linears", "layers", "by_head"),
    [
        *(
            (scheme, PACKED, LLAMA, False)
            for scheme in ("W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "FP8")
        ),
        ("ModelOpt", "ModelOptLinearMethod", LLAMA, False),
        ("W4A16", PACKED, LLAMA, True),
        ("W4A16", PACKED, DENSE, True),  # our attention in vLLM's own model
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantized_model_uses_calibrated_cache_scales(
    scheme: str, linears: str, layers: list[dict[str, Any]], by_head: bool, tmp_path: Path
) -> None:
    """Those of all heads, or of each in layers whose heads differ in number."""
    # Fused linears share a static scale, so keys and values are then as large as queries.
    factors = (1, 1) if scheme in ("FP8", "ModelOpt") else (SMALL_KEYS, LARGE_VALUES)
    packed, rounded = _packed(tmp_path, layers, scheme, *factors, by_head)
    options = GPU_OPTIONS
    if layers is DENSE:
        options = options | {"load_format": "auto", "attention_backend": "GAC"}
        for model in (packed, rounded):
            _call_dense(model)
    answered = in_engine_process(_answers, str(packed), options)
    assert answered["linears"] == [linears]
    for made, scales in zip(layers, answered["scales"], strict=True):
        keys, values = _factors(made, *factors, by_head)
        expected = SCALE * (torch.cat([keys, values] if by_head else [keys[:1], values[:1]]))
        if scheme == "ModelOpt":  # whose scales of the cache vLLM keeps in the model's dtype
            expected = expected.bfloat16().float()
        assert scales == pytest.approx(expected.tolist())
    if layers is DENSE:
        assert answered["attention"] == ["GacImpl"]
    _assert_close(answered, rounded, FP8_NOISE)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("cache", "noise"), [("auto", BF16_NOISE), ("fp8", FP8_NOISE)])
def test_qwen3_with_latent_keys_matches_the_reference(
    cache: str, noise: float, eager: bool, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", QWEN3, model_type="qwen3")
    options = GPU_OPTIONS | {"kv_cache_dtype": cache, "enforce_eager": eager}
    answered = in_engine_process(_answers, str(tmp_path / "model"), options)
    assert answered["cached bytes"] == [1 if cache == "fp8" else 2]
    _assert_close(answered, tmp_path / "model", noise)


def _packed(
    directory: Path,
    layers: list[dict[str, Any]],
    scheme: str,
    keys: float,
    values: float,
    by_head: bool,
) -> tuple[Path, Path]:
    """A quantized model with scales of its cache, and the same model with rounded weights.

    Its keys are multiplied by `keys`, and its queries divided by it; likewise `values` and o_proj.
    `by_head`: each head has another factor, and a scale of its own.
    """
    model, packed, rounded = (directory / name for name in ("model", "packed", "rounded"))
    write_model(model, layers)
    tensors, scales = load_file(model / "model.safetensors"), {}
    for index, made in enumerate(layers):
        prefix = f"model.layers.{index}.self_attn."
        of_keys, of_values = _factors(made, keys, values, by_head)
        of_queries = (1 / of_keys).repeat_interleave(QUERY_HEADS // len(of_keys))
        for name in [name for name in tensors if name.startswith(prefix)]:
            factors = {"q": of_queries, "k": of_keys, "v": of_values}
            tensors[name] = _multiplied(tensors[name], name.removeprefix(prefix), factors)
        if scheme == "ModelOpt":
            kinds = {"k_proj.k": of_keys, "v_proj.v": of_values}
        else:  # vLLM's own attention quantizes queries, too
            kinds = {"q": of_queries, "k": of_keys, "v": of_values}
        for kind, factor in kinds.items():
            scale = SCALE * factor
            scales[f"{prefix}{kind}_scale"] = scale.view(-1, 1, 1) if by_head else scale[:1].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    if scheme == "ModelOpt":
        write_modelopt_fp8(model, packed, rounded, scales, inline=False)
        return packed, rounded
    group_size = 32 if scheme.startswith("W") else None
    write_quantized(model, packed, rounded, scheme, group_size=group_size, cache_scales=scales)
    return packed, rounded


def _factors(
    made: dict[str, Any], keys: float, values: float, by_head: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the keys and values of each head of a layer are multiplied by.

    By head, each factor of keys is eight times that of the head before, and of values an eighth.
    """
    step = 8.0 if by_head else 1.0
    return (
        keys * step ** torch.arange(made["key"]["heads"]),
        values / step ** torch.arange(made["value"]["heads"]),
    )


def _multiplied(
    tensor: torch.Tensor, name: str, factors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """A tensor of an attention, for queries, keys and values times `factors` by head.

    The attention's output stays the same.
    """
    for kind, by_head in factors.items():
        if name in (f"{kind}_proj.weight", f"{kind}_proj.B.weight"):
            rows = by_head.repeat_interleave(len(tensor) // len(by_head))
            return (tensor * rows[:, None]).to(tensor.dtype)
    if name in ("o_proj.weight", "o_proj.A.weight"):
        columns = (1 / factors["v"]).repeat_interleave(tensor.shape[1] // len(factors["v"]))
        return (tensor * columns).to(tensor.dtype)
    return tensor


def _call_dense(model: Path) -> None:
    """Make the config that of a Llama that nobody compressed."""
    raw = json.loads((model / "config.json").read_text())
    del raw["gac"]
    (model / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"]}))


def _answers(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """As `described`, with logprobs of prompts, and how linears and the cache are scaled."""
    scaled: dict[str, Any] = {}

    def scales(llm: Any) -> None:
        scaled["linears"] = llm.collective_rpc(linear_methods)[0]
        scaled["scales"] = llm.collective_rpc(cache_scales)[0]
        scaled["prompts"] = scored_prompts(llm)

    return described(model, options, scales) | scaled


def _assert_close(actual: dict[str, Any], directory: Path, noise: float) -> None:
    """Check mean errors of logprobs, in parts of their spread: of prompts, and of both answers.

    `directory` holds the model as it should answer.
    """
    of_prompts = prompt_logprobs(partial(logits_of, directory)).tolist()
    pairs: list[list[tuple[float, float]]] = [[], [], []]
    pairs[0] += zip(actual["prompts"], of_prompts, strict=True)
    for i, answers_given in enumerate(actual["answers"], 1):
        for prompt, (tokens, top) in zip(PROMPTS, answers_given, strict=True):
            rows = logits_of(directory, torch.tensor([prompt + tokens]))[0].log_softmax(-1)
            for row, step in zip(rows[len(prompt) - 1 : -1], top, strict=True):
                pairs[i] += [(logprob, float(row[int(t)])) for t, logprob in step.items()]
    spread = torch.tensor(pairs[0])[:, 1].std()
    errors = [float(torch.tensor(pair).diff().abs().mean() / spread) for pair in pairs]
    assert 0 < max(errors) < noise, errors
