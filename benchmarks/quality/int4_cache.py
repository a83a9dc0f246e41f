"""What a cache of four bits costs a model, and what makes it cost less.

    python -m benchmarks.quality.int4_cache [--out OUT]
    python -m benchmarks.quality.int4_cache --run DIR --text TEXT --device cuda --out OUT

The model is the demo, or one that `benchmarks.quality.ladder train` wrote in DIR, which also has to
find a number in a long text and to copy text.

Keys after RoPE and values pass through each format before attention reads them, in fp32, with a
step and a base for each token and head, as kernels/int4_rows.py writes them. Statistics of keys
come from other text than what is scored. What costs no time when serving:

- values that are rotated: v_proj and o_proj can take up the rotation and its inverse;
- pairs whose two numbers are scaled alike: k_proj and q_proj can take up the scale;
- keys without what all keys of a head have in common: it shifts all scores of a query alike, so the
  kernel that writes keys can subtract it, and nothing has to add it again.

A rotation of keys takes time, since RoPE lies between it and the weights.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama as llama
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, documented, origin, provenance, save
from benchmarks.quality.ladder.scores import task_scores
from benchmarks.quality.ladder.text import read_tensor
from vllm_gac import demo
from vllm_gac.checkpoint.strict_json import read_json

WINDOW, SCORED, OTHERS = 900, 9, 5  # tokens, and windows of them
Change = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class Keys:
    """What is known of the keys of each layer, each [heads, head_dim]: mean, and size of pairs."""

    mean: dict[int, torch.Tensor] = field(default_factory=dict)
    pair: dict[int, torch.Tensor] = field(default_factory=dict)

    def learn(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Take up the keys [1, heads, tokens, head_dim] of other text."""
        count, mean = len(self.mean.get(layer, [])), keys.mean((0, 2))
        self.mean[layer] = mean if not count else 0.8 * self.mean[layer] + 0.2 * mean
        size = (keys - self.mean[layer][None, :, None]).square().mean((0, 2))
        low, high = size.chunk(2, dim=-1)
        both = torch.maximum(low, high).sqrt()
        self.pair[layer] = torch.cat((both, both), -1)
        return keys

    def centred(self, change: Change) -> Change:
        """`change` of what is left without the mean."""
        return lambda keys, layer: change(keys - self.mean[layer][None, :, None], layer)

    def scaled(self, change: Change, power: float) -> Change:
        """`change` of pairs that are divided by a power of their size."""

        def both(keys: torch.Tensor, layer: int) -> torch.Tensor:
            scale = self.pair[layer].pow(power)[None, :, None]
            return change(keys / scale, layer) * scale

        return both


def main() -> None:
    """Score the held-out text once for each format, and print the rows."""
    parser = documented(__doc__)
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--run", type=Path, metavar="DIR", help="of the ladder; default: the demo")
    parser.add_argument("--text", type=Path, help="what `ladder text` wrote")
    parser.add_argument("--device", default="cpu")
    add_commit(parser)
    options = parser.parse_args()
    asked = _of_ladder(options) if options.run else _of_demo()
    rows = []
    for row in _rows(asked):
        rows.append(row)
        print(row, flush=True)
    if options.out:
        command = "python -m benchmarks.quality.int4_cache"
        command += " --run DIR --text TEXT --device cuda" if options.run else ""
        result = provenance(command, options.device, options.commit) | {"rows": rows}
        count, length = asked.scored.shape
        page = [
            f"# What four bits in the cache cost {asked.name}",
            "",
            f"{origin(result)}.",
            f"{count * length} held-out tokens in windows of {length}, fp32 but for the cache. "
            "Lost: nats per token over the cache in fp32, and the standard error of the mean over "
            "tokens. Keys and values have a step and a base for each token and head. *Free* says "
            "whether it costs no time when serving.",
            "",
            *table_of_records(rows),
            "",
        ]
        save(options.out, result, "\n".join(page))


@dataclass(frozen=True, slots=True)
class Asked:
    """A model [directory], and the windows [count, length] of which it is scored or known."""

    name: str
    directory: Path
    device: str
    scored: torch.Tensor
    others: torch.Tensor
    has_tasks: bool


def _of_demo() -> Asked:
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    ids = tokenizer.encode(demo.HELD_OUT.read_text()).ids[: WINDOW * (SCORED + OTHERS)]
    windows = torch.tensor(ids).view(-1, WINDOW)
    return Asked("the demo model", demo.MODEL, "cpu", windows[:SCORED], windows[SCORED:], False)


def _of_ladder(options: argparse.Namespace) -> Asked:
    run = read_json(options.run / "run.json")
    windows = read_tensor(options.text, "heldout.safetensors", "windows").long()
    parameters, tokens = run["parameters"] / 1e6, run["trained_tokens"] / 1e6
    name = f"a model of {parameters:.0f} M parameters, trained on {tokens:.0f} M tokens"
    where = options.run / "model"
    return Asked(name, where, options.device, windows[OTHERS:], windows[:OTHERS], True)


def _rows(asked: Asked) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        asked.directory, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.eval().to(asked.device)
    known = Keys()
    _nats(model, asked.others, known.learn, _same)
    whole = _nats(model, asked.scored, _same, _same)
    centred = known.centred(_int4)
    scaled = known.centred(known.scaled(_int4, 0.3))
    formats: list[tuple[str, str, str, Change, Change]] = [
        *([("fp32", "fp32", "yes", _same, _same)] if asked.has_tasks else []),
        ("FP8", "FP8", "yes", _fp8, _fp8),
        ("FP8", "4 bits", "yes", _fp8, _int4),
        ("fp32", "4 bits", "yes", _same, _int4),
        ("fp32", "4 bits, rotated", "yes", _same, _rotated(_int4)),
        ("4 bits", "fp32", "yes", _int4, _same),
        ("4 bits, rotated", "fp32", "no", _rotated(_int4), _same),
        ("4 bits, groups of 32", "fp32", "yes", _grouped(_int4), _same),
        ("4 bits without the mean", "fp32", "yes", centred, _same),
        ("4 bits without the mean, pairs scaled", "fp32", "yes", scaled, _same),
        ("4 bits", "4 bits", "yes", _int4, _int4),
        (
            "4 bits without the mean, pairs scaled",
            "4 bits, rotated",
            "yes",
            scaled,
            _rotated(_int4),
        ),
        ("4 bits, rotated", "4 bits, rotated", "no", _rotated(_int4), _rotated(_int4)),
    ]
    for keys, values, free, change_keys, change_values in formats:
        lost = _nats(model, asked.scored, change_keys, change_values) - whole
        error = float(lost.std()) / math.sqrt(len(lost))
        tasks = _tasks(asked, model, change_keys, change_values) if asked.has_tasks else {}
        yield {
            "keys": keys,
            "values": values,
            "free": free,
            "lost": f"{float(lost.mean()):+.4f} ± {error:.4f}",
            "mean difference of a logprob": f"{float(lost.abs().mean()):.4f}",
            **tasks,
        }


def _tasks(asked: Asked, model: torch.nn.Module, keys: Change, values: Change) -> dict[str, str]:
    """The share of right tokens of the answers, by task and length."""
    tokenizer = Tokenizer.from_file(str(asked.directory / "tokenizer.json"))
    context = model.config.max_position_embeddings
    with _cached_as(keys, values):
        found = task_scores(lambda ids: _logits(model, ids), tokenizer, asked.scored, context)
    return {task: f"{score['right']:.3f}" for task, score in found.items()}


def _nats(
    model: torch.nn.Module, windows: torch.Tensor, keys: Change, values: Change
) -> torch.Tensor:
    """The loss of every token of the windows, where attention reads changed keys and values."""
    found = []
    with _cached_as(keys, values):
        for window in windows.to(model.device):
            logprobs = _logits(model, window[None])[0, :-1].log_softmax(-1)
            found.append(-logprobs.gather(1, window[1:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids.long().to(model.device)).logits


@contextmanager
def _cached_as(keys: Change, values: Change) -> Iterator[None]:
    """Meanwhile attention reads changed keys and values."""
    attend = llama.eager_attention_forward

    def changed(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        layer = module.layer_idx
        return attend(module, query, keys(key, layer), values(value, layer), *rest, **more)

    llama.eager_attention_forward = changed
    try:
        yield
    finally:
        llama.eager_attention_forward = attend


def _same(x: torch.Tensor, layer: int) -> torch.Tensor:
    return x


def _fp8(x: torch.Tensor, layer: int) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()


def _int4(x: torch.Tensor, layer: int) -> torch.Tensor:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((most - least) / 15).clamp_min(1e-8)
    return ((x - least) / step).round() * step + least


def _grouped(change: Change, size: int = 32) -> Change:
    return lambda x, layer: change(x.unflatten(-1, (-1, size)), layer).flatten(-2)


def _rotated(change: Change) -> Change:
    """`change` of numbers that a Hadamard matrix has mixed."""

    def both(x: torch.Tensor, layer: int) -> torch.Tensor:
        matrix = x.new_ones(1, 1)
        while len(matrix) < x.shape[-1]:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        matrix = matrix / math.sqrt(len(matrix))
        return change(x @ matrix, layer) @ matrix

    return both


if __name__ == "__main__":
    main()
