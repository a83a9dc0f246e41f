"""The page: what the engines measured, and ratios of it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.common.completions import agreement
from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin
from benchmarks.engines.parallel.models import RATIOS, SHAPES, Shape, in_fp8
from benchmarks.engines.whole_model.grid.cells import PLANNED_FP8
from benchmarks.engines.whole_model.planned import REQUESTS

Seen = Mapping[str, Mapping[str, Any]]
_FP8 = "FP8 weights and cache"
_ONE = "TP 1"


def page(result: Mapping[str, Any]) -> str:
    """Markdown of a result that `__main__` wrote."""
    parts = [part for part in ("speed", "fp8", "tokens", "tokens-fp8") if part in result]
    seen = next(iter(result[parts[0]].values()))
    return document(
        "One model on two GPUs of one host",
        f"{origin({**seen, **result})}. vLLM's defaults (CUDA graphs: {seen['cudagraphs']}); up to "
        f"{result['at_once']} engines were up at once, and were measured one after the other.",
        *(_tokens(result["tokens"], "bf16") if "tokens" in result else ()),
        *(_speed(result, "speed") if "speed" in result else ()),
        *(_tokens(result["tokens-fp8"], _FP8) if "tokens-fp8" in result else ()),
        *(_speed(result, "fp8") if "fp8" in result else ()),
    )


def _tokens(seen: Seen, types: str) -> list[Block]:
    rows = []
    for name, two in seen.items():
        model, _, way = name.rpartition(", ")
        if way == _ONE:
            continue
        one = seen[f"{model}, {_ONE}"]
        off = [abs(a - b) for a, b in zip(one["text_logprobs"], two["text_logprobs"], strict=True)]
        perplexities = [math.exp(-statistics.mean(x["text_logprobs"])) for x in (one, two)]
        completions = agreement(one["completions"], two["completions"])
        rows.append(
            [
                model,
                way,
                len(off),
                f"{perplexities[0]:.4f}, {perplexities[1]:.4f}",
                f"{statistics.mean(off):.4f}, {max(off):.3f}",
                f"{completions.equal} of {completions.total}",
                ", ".join(f"{gap:.3f}" for gap in completions.gaps) or "-",
            ]
        )
    columns = ["model", "on two GPUs", "held-out tokens", "perplexity on one, on two"]
    columns += ["difference of logprobs, mean and largest", "equal greedy tokens", "gaps"]
    return [
        f"## Two GPUs against one, {types}",
        "The demo model with its trained weights. Two ranks add in another order than one, and "
        "quantize halves of a row by scales of their own, if at all: the dense model shows how "
        "much that is. A gap is how much likelier one GPU found its own token than two did, at the "
        "first difference of two completions.",
        table(columns, rows),
    ]


def _speed(result: Mapping[str, Any], part: str) -> list[Block]:
    seen, shape = result[part], SHAPES[result["shape"]]
    if part == "fp8":
        shape = in_fp8(shape)
    prompts, step = shape.prefill, shape.decode
    rows = []
    for name, run in seen.items():
        prefill, decode = (statistics.median(run[phase]) for phase in ("prefill", "decode"))
        rows.append(
            [
                name,
                f"{prompts.prompts * prompts.length / prefill:,.0f}",
                f"{decode * 1e3:.3f}",
                f"{step.prompts / decode:,.0f}",
                f"{run['kv_tokens']:,}",
                f"{run['startup_seconds']:.0f}",
            ]
        )
    columns = ["model", "prefill, tokens/s", "decode, ms a step", "tokens/s", "room", "startup, s"]
    models = _fp8_models() if part == "fp8" else _models(result, shape)
    return [
        f"## Throughput, {_FP8 if part == 'fp8' else 'bf16'}",
        f"The shape {result['shape']}, random weights. {models} "
        f"Prefill: {prompts.prompts} prompts of {prompts.length} tokens; decode: a step of "
        f"{step.prompts} sequences at {step.length} to {step.length + step.output - 1} tokens; "
        f"medians of {shape.repeats}. Room: tokens in {shape.cache_bytes / 2**30:.3g} GiB of "
        "cache on each GPU.",
        table(columns, rows),
        table(["ratio", "prefill", "decode", "room"], _ratios(seen, RATIOS[part])),
    ]


def _models(result: Mapping[str, Any], shape: Shape) -> str:
    key, value = result["layer"]["key"], result["layer"]["value"]
    return (
        f"GAC: {key['form']} keys {key['heads']} x {key['size']}, values {value['heads']} x "
        f"{value['size']} (first layer), MLP width {shape.width}, which is {shape.width // 2} on "
        f"each of two GPUs. Aligned before sharding: {shape.before}, a multiple of 8 whose half is "
        f"{shape.before // 2}."
    )


def _fp8_models() -> str:
    what, _ = REQUESTS[PLANNED_FP8]
    half_cache, _ = REQUESTS["planned"]
    return f"Plan: {half_cache}; {what}. The others are those of the whole-model benchmark."


def _ratios(seen: Seen, pairs: Iterable[tuple[str, str]]) -> Iterator[list[str]]:
    """Speedups, and room over room, of pairs of engines."""
    for new, old in pairs:
        if new in seen and old in seen:
            ratios = [
                statistics.median(seen[old][phase]) / statistics.median(seen[new][phase])
                for phase in ("prefill", "decode")
            ]
            ratios.append(seen[new]["kv_tokens"] / seen[old]["kv_tokens"])
            yield [f"{new} over {old}", *(f"{ratio:.3f}" for ratio in ratios)]
