"""What the engines saw, as one page of ratios."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines.parallel.models import SHAPES

Seen = Mapping[str, Mapping[str, Any]]


def page(result: Mapping[str, Any]) -> str:
    """Markdown of a result as `__main__` writes it."""
    parts = ["# Tensor parallelism, two GPUs of one host\n", _about(result)]
    if "tokens" in result:
        parts.append(_tokens(result["tokens"]))
    if "speed" in result:
        parts.append(_speed(result))
    return "\n".join(parts)


def _about(result: Mapping[str, Any]) -> str:
    seen = next(iter((result.get("speed") or result["tokens"]).values()))
    versions = ", ".join(f"{name} {version}" for name, version in seen["versions"].items())
    return (
        f"    {result['command']}\n\n{seen['machine']}, {versions}; {result['date']}, commit "
        f"{result['commit']}. vLLM's defaults (CUDA graphs: {seen['cudagraphs']}); up to "
        f"{result['at_once']} engines were up at once, and measured one after the other.\n"
    )


def _tokens(seen: Seen) -> str:
    lines = [
        "## TP = 2 against TP = 1\n",
        "The demo model, bf16, with its trained weights. Ranks add in another order, and bf16 "
        "resolves 0.06 of a logprob: the dense model shows how much that is. A gap is how much "
        "likelier TP = 1 held its own token than TP = 2's where two completions part.\n",
        "| model | held-out tokens | perplexity TP 1, TP 2 | logprobs off by, mean and largest "
        "| greedy tokens alike | gaps |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in ("dense", "GAC"):
        one, two = seen[f"{model}, TP 1"], seen[f"{model}, TP 2"]
        off = [abs(a - b) for a, b in zip(one["text_logprobs"], two["text_logprobs"], strict=True)]
        perplexities = [math.exp(-statistics.mean(x["text_logprobs"])) for x in (one, two)]
        alike, total, gaps = _alike(one["completions"], two["completions"])
        lines.append(
            f"| {model} | {len(off)} | {perplexities[0]:.4f}, {perplexities[1]:.4f} "
            f"| {statistics.mean(off):.4f}, {max(off):.3f} | {alike} of {total} "
            f"| {', '.join(f'{gap:.3f}' for gap in gaps) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def _alike(
    one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]
) -> tuple[int, int, list[float]]:
    """Tokens before the first difference of each prompt, all tokens, logprob gaps there."""
    alike = total = 0
    gaps = []
    for left, right in zip(one, two, strict=True):
        pairs = list(zip(left["tokens"], right["tokens"], strict=True))
        until = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        alike, total = alike + until, total + len(pairs)
        if until < len(pairs):
            top = dict(left["top"][until])
            gaps.append(max(top.values()) - top.get(right["tokens"][until], -math.inf))
    return alike, total, gaps


def _speed(result: Mapping[str, Any]) -> str:
    seen, shape = result["speed"], SHAPES[result["shape"]]
    prompts, step = shape.prefill, shape.decode
    layer = result["layer"]
    key, value = layer["key"], layer["value"]
    lines = [
        "## Throughput\n",
        f"The shape {result['shape']}, random weights. GAC: {key['form']} keys {key['heads']} x "
        f"{key['size']}, values {value['heads']} x {value['size']} (first layer), MLP width "
        f"{shape.width}, so {shape.width // 2} on each of two GPUs. Aligned before sharding: "
        f"{shape.before}, a multiple of 8 whose half is {shape.before // 2}. "
        f"Prefill: {prompts.prompts} prompts of {prompts.length} tokens; decode: a step of "
        f"{step.prompts} sequences at {step.length} to {step.length + step.output - 1} tokens; "
        f"medians of {shape.repeats}. Room: tokens in {shape.cache_bytes / 2**30:.3g} GiB of "
        "cache on each GPU.\n",
        "| model | prefill, tokens/s | decode, ms a step | tokens/s | room | startup, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in seen.items():
        prefill, decode = (statistics.median(run[phase]) for phase in ("prefill", "decode"))
        lines.append(
            f"| {name} | {prompts.prompts * prompts.length / prefill:,.0f} | {decode * 1e3:.3f} "
            f"| {step.prompts / decode:,.0f} | {run['cache_tokens']:,} "
            f"| {run['startup_seconds']:.0f} |"
        )
    lines += [
        "",
        "| faster by, from this run | prefill | decode | room |",
        "| --- |" + " --- |" * 3,
    ]
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
            ratios.append(seen[new]["cache_tokens"] / seen[old]["cache_tokens"])
            cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
            lines.append(f"| {new} over {old} | {cells} |")
    return "\n".join(lines) + "\n"
