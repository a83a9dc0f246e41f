"""The page: what the engines measured, and ratios of it."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common.completions import agreement
from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin
from benchmarks.engines.parallel.models import SHAPES

Seen = Mapping[str, Mapping[str, Any]]


def page(result: Mapping[str, Any]) -> str:
    """Markdown of a result that `__main__` wrote."""
    seen = next(iter((result.get("speed") or result["tokens"]).values()))
    return document(
        "Tensor parallelism, two GPUs of one host",
        f"{origin({**seen, **result})}. vLLM's defaults (CUDA graphs: {seen['cudagraphs']}); up to "
        f"{result['at_once']} engines were up at once, and were measured one after the other.",
        *(_tokens(result["tokens"]) if "tokens" in result else ()),
        *(_speed(result) if "speed" in result else ()),
    )


def _tokens(seen: Seen) -> list[Block]:
    rows = []
    for model in ("dense", "GAC"):
        one, two = seen[f"{model}, TP 1"], seen[f"{model}, TP 2"]
        off = [abs(a - b) for a, b in zip(one["text_logprobs"], two["text_logprobs"], strict=True)]
        perplexities = [math.exp(-statistics.mean(x["text_logprobs"])) for x in (one, two)]
        completions = agreement(one["completions"], two["completions"])
        rows.append(
            [
                model,
                len(off),
                f"{perplexities[0]:.4f}, {perplexities[1]:.4f}",
                f"{statistics.mean(off):.4f}, {max(off):.3f}",
                f"{completions.equal} of {completions.total}",
                ", ".join(f"{gap:.3f}" for gap in completions.gaps) or "-",
            ]
        )
    columns = ["model", "held-out tokens", "perplexity TP 1, TP 2"]
    columns += ["difference of logprobs, mean and largest", "equal greedy tokens", "gaps"]
    return [
        "## TP = 2 against TP = 1",
        "The demo model, bf16, with its trained weights. Two ranks add in another order than one, "
        "and bf16 resolves 0.06 of a logprob: the dense model shows how much that is. A gap is "
        "how much likelier TP = 1 found its own token than TP = 2's, at the first difference of "
        "two completions.",
        table(columns, rows),
    ]


def _speed(result: Mapping[str, Any]) -> list[Block]:
    seen, shape = result["speed"], SHAPES[result["shape"]]
    prompts, step = shape.prefill, shape.decode
    layer = result["layer"]
    key, value = layer["key"], layer["value"]
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
    return [
        "## Throughput",
        f"The shape {result['shape']}, random weights. GAC: {key['form']} keys {key['heads']} x "
        f"{key['size']}, values {value['heads']} x {value['size']} (first layer), MLP width "
        f"{shape.width}, which is {shape.width // 2} on each of two GPUs. Aligned before sharding: "
        f"{shape.before}, a multiple of 8 whose half is {shape.before // 2}. "
        f"Prefill: {prompts.prompts} prompts of {prompts.length} tokens; decode: a step of "
        f"{step.prompts} sequences at {step.length} to {step.length + step.output - 1} tokens; "
        f"medians of {shape.repeats}. Room: tokens in {shape.cache_bytes / 2**30:.3g} GiB of "
        "cache on each GPU.",
        table(columns, rows),
        table(["ratio", "prefill", "decode", "room"], _ratios(seen)),
    ]


def _ratios(seen: Seen) -> Iterator[list[str]]:
    """Speedups, and room over room, of pairs of engines."""
    for new, old in (
        ("GAC, TP 1", "dense, TP 1"),
        ("GAC, TP 2", "dense, TP 2"),
        ("dense, TP 2", "dense, TP 1"),
        ("GAC, TP 2", "GAC, TP 1"),
        ("GAC, TP 2", "GAC aligned before sharding, TP 2"),
        ("the same, padded while loading, TP 2", "GAC aligned before sharding, TP 2"),
    ):
        if new in seen and old in seen:
            ratios = [
                statistics.median(seen[old][phase]) / statistics.median(seen[new][phase])
                for phase in ("prefill", "decode")
            ]
            ratios.append(seen[new]["kv_tokens"] / seen[old]["kv_tokens"])
            yield [f"{new} over {old}", *(f"{ratio:.3f}" for ratio in ratios)]
