"""What a cache of four bits costs the demo model, and what makes it cost less.

    python -m benchmarks.quality.int4_cache [--out OUT]

Keys after RoPE and values pass through each format before attention reads them, in fp32, with a
step and a base for each token and head, as kernels/int4_rows.py writes them. Statistics of keys
come from other text than what is scored. What costs no time when serving:

- values that are rotated: v_proj and o_proj can take up the rotation and its inverse;
- pairs whose two numbers are scaled alike: k_proj and q_proj can take up the scale;
- keys without what all keys of a head have in common: it shifts all scores of a query alike, so the
  kernel that writes keys can subtract it, and nothing has to add it again.

A rotation of keys takes time, since RoPE lies between it and the weights.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama as llama
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, documented, origin, provenance, save
from vllm_gac import demo

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
    add_commit(parser)
    options = parser.parse_args()
    rows = []
    for row in _rows():
        rows.append(row)
        print(row, flush=True)
    if options.out:
        command = "python -m benchmarks.quality.int4_cache"
        result = provenance(command, "cpu", options.commit) | {"rows": rows}
        page = [
            "# What four bits in the cache cost the demo model",
            "",
            f"{origin(result)}.",
            f"{SCORED * WINDOW} held-out tokens in windows of {WINDOW}, fp32 but for the cache. "
            "Lost: nats per token over the cache in fp32, and the standard error of the mean over "
            "tokens. Keys and values have a step and a base for each token and head. *Free* says "
            "whether it costs no time when serving.",
            "",
            *table_of_records(rows),
            "",
        ]
        save(options.out, result, "\n".join(page))


def _rows() -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        demo.MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    ids = tokenizer.encode(demo.HELD_OUT.read_text()).ids
    windows = [ids[i : i + WINDOW] for i in range(0, WINDOW * (SCORED + OTHERS), WINDOW)]
    scored, others = windows[:SCORED], windows[SCORED:]
    known = Keys()
    _nats(model, others, known.learn, _same)
    whole = _nats(model, scored, _same, _same)
    centred = known.centred(_int4)
    scaled = known.centred(known.scaled(_int4, 0.3))
    formats: list[tuple[str, str, str, Change, Change]] = [
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
        lost = _nats(model, scored, change_keys, change_values) - whole
        error = float(lost.std()) / math.sqrt(len(lost))
        yield {
            "keys": keys,
            "values": values,
            "free": free,
            "lost": f"{float(lost.mean()):+.4f} ± {error:.4f}",
            "mean difference of a logprob": f"{float(lost.abs().mean()):.4f}",
        }


@torch.no_grad()
def _nats(
    model: torch.nn.Module, windows: list[list[int]], keys: Change, values: Change
) -> torch.Tensor:
    """The loss of every token of the windows, where attention reads changed keys and values."""
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
        found = []
        for window in windows:
            ids = torch.tensor([window])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
            found.append(-logprobs.gather(1, ids[0, 1:, None])[:, 0])
        return torch.cat(found)
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
        matrix = torch.ones(1, 1)
        while len(matrix) < x.shape[-1]:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        matrix = matrix / math.sqrt(len(matrix))
        return change(x @ matrix, layer) @ matrix

    return both


if __name__ == "__main__":
    main()
