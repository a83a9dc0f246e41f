"""The page of the combinations."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin

_QUANTIZED = """\
Llama-3-8B's shape, random weights. `gac` follows the plan for 0.8 of the parameters and
0.75 of the KV cache. `misaligned` is the same with every dim just above an aligned one;
it is padded to what FP8 asks for before it is quantized. Median seconds of a batch, and
speedup over the first row."""
_LORA = """\
A random adapter of every linear, on the demo model with unequal, latent and misaligned
attention, which is padded on loading. Compared with the merged model."""


def page(result: Mapping[str, Any]) -> str:
    """Markdown of all parts that were measured."""
    blocks: list[Block] = []
    for name, part in result["parts"].items():
        blocks += [*SECTIONS[name](part), f"{origin(part)}, {part['seconds']} s."]
    return document("Compression with what users combine it with", *blocks)


def quantization(part: Mapping[str, Any]) -> list[Block]:
    """Throughput against the first row; perplexity, and its distance from bf16."""
    said = part["throughput"]
    timed = {name: _medians(x) for name, x in said.items() if "error" not in x}
    base = next(iter(timed.values()), {})
    rows = []
    for name, x in said.items():
        if name not in timed:
            rows.append([name, x["error"]])
            continue
        cells = [f"{s:.3f} ({base[b] / s:.2f}x)" for b, s in timed[name].items()]
        rows.append([name, *cells, ", ".join(x["facts"]["linears"]), _attention(x)])
    scores = [[name, *_scores(x)] for name, x in part["perplexity"].items()]
    return [
        "## Quantized while it is loaded",
        _QUANTIZED,
        table(["", *(f"{batch}, s" for batch in base), "linears", "attention"], rows),
        "The demo model on held-out text, against bf16:",
        table(["", *SCORES], scores),
    ]


def kv(part: Mapping[str, Any]) -> list[Block]:
    """FP8 KV against bf16 KV of the same model, and the offloaded cache."""
    rows = [
        [name, *_scores(x), _equal_tokens(x), _attention(x)] for name, x in part["caches"].items()
    ]
    head = ["cache", *SCORES, "equal greedy tokens", "attention"]
    blocks: list[Block] = ["## FP8 KV cache and KV offloading", table(head, rows)]
    moved = part["offloading"]
    if "error" in moved:
        return [*blocks, f"OffloadingConnector: {moved['error']}"]
    cached = [answer["cached"] for answer in moved["brought back"]]
    pairs = list(zip(moved["first"], moved["brought back"], strict=True))
    equal = sum(before["tokens"] == after["tokens"] for before, after in pairs)
    # The first token of an answer follows from the prompt alone.
    moves = [abs(after["logprobs"][0] - before["logprobs"][0]) for before, after in pairs]
    return [
        *blocks,
        f"OffloadingConnector, layers of different shapes: {cached} tokens of four prompts came "
        "back from the CPU after the GPU's cache was emptied. The logprobs of the next tokens "
        f"changed by {max(moves):.3f} at most (other kernels run on a cached prompt), and {equal} "
        f"of {len(cached)} answers of {len(moved['first'][0]['tokens'])} tokens are equal.",
    ]


def lifecycle(part: Mapping[str, Any]) -> list[Block]:
    """Every step of the life cycle, compared with the start."""
    blocks: list[Block] = [
        "## Life cycle of a padded checkpoint",
        "The demo model with unequal, latent and misaligned attention, which is padded on loading.",
    ]
    steps = part["steps"]
    if "error" in steps:
        return [*blocks, steps["error"]]
    rows = []
    for name, x in steps.items():
        if name != "facts":
            freed = f"{x['freed_bytes'] / 2**20:.0f} MiB" if "freed_bytes" in x else ""
            rows.append([name, *_scores(x), _equal_tokens(x), freed])
    ngram = part["ngram"]
    drafted = (
        f"n-gram: {ngram['error']}"
        if "error" in ngram
        else f"Speculative decoding by n-grams: {ngram['accepted']:.0f} of {ngram['draft']:.0f} "
        f"drafted tokens accepted, {_equal_tokens(ngram)} tokens equal."
    )
    return [*blocks, table(["after", *SCORES, "equal greedy tokens", "freed"], rows), drafted]


def lora(part: Mapping[str, Any]) -> list[Block]:
    """The adapter, and the model without it, compared with the merged model."""
    names = ("merged", "adapter", "base", "base again")
    return [
        "## LoRA",
        _LORA,
        table(["", *SCORES], [[name, *_scores(part[name])] for name in names]),
    ]


SECTIONS = {"quantization": quantization, "kv": kv, "lifecycle": lifecycle, "lora": lora}
SCORES = ["perplexity", "mean abs. difference of logprobs", "largest"]


def _medians(x: Mapping[str, Any]) -> dict[str, float]:
    return {batch: statistics.median(runs) for batch, runs in x["seconds"].items()}


def _scores(x: Mapping[str, Any]) -> list[str]:
    if "error" in x:
        return [x["error"], "", ""]
    cells = [f"{x['perplexity']:.4f}"]
    if "mean_difference" not in x:
        return [*cells, "", ""]
    return [*cells, f"{x['mean_difference']:.5f}", f"{x['largest_difference']:.3f}"]


def _equal_tokens(x: Mapping[str, Any]) -> str:
    return f"{x['equal_tokens']} of {x['tokens']}" if "equal_tokens" in x else ""


def _attention(x: Mapping[str, Any]) -> str:
    return ", ".join(sorted(set(x["facts"]["attention"]))) if "facts" in x else ""
