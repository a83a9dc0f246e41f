"""On a GPU: quantized models with scaled FP8 caches, and latent keys of a Qwen3 in FP8 caches.

What is expected is computed on the CPU: the reference model, in fp32, of the rounded weights. Its
keys and values are exact.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.agreement import PROMPTS
from tests.serving.engines import (
    GPU_OPTIONS,
    answers,
    cache_scales,
    in_engine_process,
    linear_methods,
    scored_prompts,
)
from tests.serving.models import layer, write_model
from tests.serving.quantized import write_modelopt_fp8, write_quantized
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import logits, reference

# Dense, selected pairs, fewer value heads, low rank; and latents, one for each KV head or for two.
LLAMA = [
    layer(("rotary", 4, 64), (4, 64), 512),
    layer(("rotary", 4, 48), (4, 32), 384),
    layer(("rotary", 4, 64), (2, 64), 448),
    layer(("rotary", 4, 64), (4, 64), 512, {"self_attn.k_proj": 32, "self_attn.o_proj": 96}),
    layer(("latent", 4, 32), (2, 48), 256, {"mlp.down_proj": 64, "self_attn.q_proj": 96}),
    layer(("latent", 2, 64), (2, 64), 512),
]
QWEN3 = [
    layer(("latent", 4, 32), (4, 64), 512),
    layer(("latent", 4, 48), (2, 64), 384, {"self_attn.q_proj": 96}),
    layer(("latent", 4, 64), (4, 32), 512, {"self_attn.k_proj": 96}),
    layer(("rotary", 4, 48), (4, 48), 512),
    layer(("rotary", 4, 64), (4, 64), 512),
]
# The largest number of a head whose mean square is 1 is below 8; 448 is FP8's largest.
SCALE = 8 / 448
# What keys and values are multiplied by, so that an FP8 cache without scales loses both: keys fall
# below its smallest number, values exceed its largest.
SMALL_KEYS, LARGE_VALUES = 2.0**-10, 2.0**12
# Of the spread of logprobs. bf16 alone, and what FP8 adds.
BF16_NOISE, FP8_NOISE = 0.05, 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_a_quantized_model_needs_and_gets_the_scales_of_its_cache(
    scheme: str, tmp_path: Path
) -> None:
    packed, rounded = _packed(tmp_path, LLAMA, scheme, SMALL_KEYS, LARGE_VALUES)
    found = in_engine_process(_answers, str(packed), GPU_OPTIONS)
    assert found["linears"] == ["CompressedTensorsLinearMethod"]
    expected = pytest.approx([SCALE * SMALL_KEYS, SCALE * LARGE_VALUES])
    assert found["scales"] == [expected] * len(LLAMA)
    _assert_close(found, rounded, FP8_NOISE)


@pytest.mark.gpu
def test_with_scales_of_one_it_would_be_wrong(tmp_path: Path) -> None:
    """So the test above can fail."""
    packed, rounded = _packed(tmp_path, LLAMA, "W4A16", SMALL_KEYS, LARGE_VALUES)
    tensors = load_file(packed / "model.safetensors")
    for kind in ("k_scale", "v_scale"):
        tensors |= {name: torch.ones(1) for name in _scales(len(LLAMA), kind, 1)}
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    found = in_engine_process(_answers, str(packed), GPU_OPTIONS)
    assert min(_errors(found, rounded)) > 2 * FP8_NOISE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("scheme", "linears"),
    [("FP8", "CompressedTensorsLinearMethod"), ("ModelOpt", "ModelOptLinearMethod")],
)
def test_static_fp8_answers_as_its_rounded_weights(
    scheme: str, linears: str, tmp_path: Path
) -> None:
    """Fused linears share a scale, so keys and values are as large as queries."""
    packed, rounded = _packed(tmp_path, LLAMA, scheme, 1, 1)
    found = in_engine_process(_answers, str(packed), GPU_OPTIONS)
    assert found["linears"] == [linears]
    assert found["scales"] == [pytest.approx([SCALE, SCALE])] * len(LLAMA)
    _assert_close(found, rounded, FP8_NOISE)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("cache", "noise"), [("auto", BF16_NOISE), ("fp8", FP8_NOISE)])
def test_a_qwen3_with_latent_keys_answers_as_the_reference(
    cache: str, noise: float, eager: bool, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", QWEN3, model_type="qwen3")
    options = GPU_OPTIONS | {"kv_cache_dtype": cache, "enforce_eager": eager}
    found = in_engine_process(_answers, str(tmp_path / "model"), options)
    assert found["cached bytes"] == [1 if cache == "fp8" else 2]
    _assert_close(found, tmp_path / "model", noise)


@pytest.mark.gpu
def test_so_does_a_quantized_one_with_a_scaled_cache(tmp_path: Path) -> None:
    """Its keys are normed, so that only values can be large."""
    packed, rounded = _packed(tmp_path, QWEN3, "W4A16", 1, LARGE_VALUES, model_type="qwen3")
    found = in_engine_process(_answers, str(packed), GPU_OPTIONS)
    assert found["scales"] == [pytest.approx([SCALE, SCALE * LARGE_VALUES])] * len(QWEN3)
    _assert_close(found, rounded, FP8_NOISE)


def _packed(
    directory: Path,
    layers: list[dict[str, Any]],
    scheme: str,
    keys: float,
    values: float,
    **config: Any,
) -> tuple[Path, Path]:
    """A quantized model with scales of its cache, and the same model with rounded weights.

    Args:
        directory: Gets both.
        layers: The layers of the model.
        scheme: What is done to its weights.
        keys: What its keys are multiplied by, and its queries divided by. `values` likewise.
        config: What its config.json says beside.
    """
    model, packed, rounded = (directory / name for name in ("model", "packed", "rounded"))
    write_model(model, layers, **config)
    tensors = _multiplied(load_file(model / "model.safetensors"), keys, values)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    count = len(layers)
    if scheme == "ModelOpt":
        scales = _scales(count, "k_proj.k_scale", keys) | _scales(count, "v_proj.v_scale", values)
        write_modelopt_fp8(model, packed, rounded, scales, inline=False)
        return packed, rounded
    scales = _scales(count, "k_scale", keys) | _scales(count, "v_scale", values)
    scales |= _scales(count, "q_scale", 1 / keys)  # vLLM's own attention quantizes queries, too
    group_size = 32 if scheme.startswith("W4") else None
    write_quantized(model, packed, rounded, scheme, group_size=group_size, cache_scales=scales)
    return packed, rounded


def _multiplied(
    tensors: Mapping[str, torch.Tensor], keys: float, values: float
) -> dict[str, torch.Tensor]:
    """A model's tensors with other keys and values, which give the same logits."""
    factors = {"q_proj": 1 / keys, "k_proj": keys, "v_proj": values, "o_proj": 1 / values}
    return {
        name: tensor * next((f for part, f in factors.items() if _is_last(name, part)), 1)
        for name, tensor in tensors.items()
    }


def _is_last(name: str, linear: str) -> bool:
    """Whether it is the weight of `linear`, or the second of its two factors."""
    return name.endswith((f".{linear}.weight", f".{linear}.B.weight"))


def _scales(layers: int, name: str, factor: float) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{index}.self_attn.{name}" for index in range(layers)]
    return {name: torch.tensor([SCALE * factor]) for name in names}


def _answers(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Answers, those of prompts that are cached, logprobs of prompts, and how all is served."""
    from vllm import LLM

    llm = LLM(model, **options)
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {
        "linears": llm.collective_rpc(linear_methods)[0],
        "scales": llm.collective_rpc(cache_scales)[0],
        "cached bytes": sorted({layer.kv_cache.element_size() for layer in context.values()}),
        "answers": [answers(llm), answers(llm)],
        "prompts": scored_prompts(llm),
    }


def _assert_close(found: dict[str, Any], directory: Path, noise: float) -> None:
    errors = _errors(found, directory)
    assert 0 < max(errors) < noise, errors


def _errors(found: dict[str, Any], directory: Path) -> list[float]:
    """Mean errors of logprobs, in parts of their spread: of prompts, and of each round of answers.

    `directory` holds the model as it should answer.
    """
    checkpoint = open_checkpoint(directory)
    model = reference(checkpoint)
    pairs: list[list[tuple[float, float]]] = [[], [], []]
    given = iter(found["prompts"])
    with checkpoint.reader() as read:

        def logprobs(tokens: list[int]) -> torch.Tensor:
            return logits(model, read, torch.tensor([tokens]))[0].log_softmax(-1)

        for prompt in PROMPTS:
            rows = logprobs(prompt)
            for row, token in zip(rows[:-1], prompt[1:], strict=True):
                pairs[0].append((next(given), float(row[token])))
        for i, answers_given in enumerate(found["answers"], 1):
            for prompt, (tokens, top) in zip(PROMPTS, answers_given, strict=True):
                rows = logprobs(prompt + tokens)[len(prompt) - 1 : -1]
                for row, step in zip(rows, top, strict=True):
                    pairs[i] += [(logprob, float(row[int(t)])) for t, logprob in step.items()]
    spread = torch.tensor(pairs[0])[:, 1].std()
    differences = [torch.tensor(pair).diff().abs().mean() / spread for pair in pairs]
    return [float(difference) for difference in differences]
