"""What each form of the cache loses at equal bytes, what narrower MLPs lose, and in which layers.

Layers are fitted, and not refitted or healed. Each row is the plan that the statistics expect to
lose least of those that its form allows, so that the dims differ from layer to layer; or narrows
the MLP of every layer alike. The text that was set aside is the one that
probes ran on, so that the expected losses are of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import kl_div

from benchmarks.common.result import Cell, Result, provenance
from vllm_gac.checkpoint.open import Checkpoint, TensorReader, open_dense
from vllm_gac.compression.measured import HELD, shrink_covariances
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    cast,
    embed_all,
    head,
    layer_outputs,
    layer_weights,
    reference,
)
from vllm_gac.compression.statistics_file import Statistics, open_statistics
from vllm_gac.layout.dims import LayerLayout
from vllm_gac.planning.knapsack import choose
from vllm_gac.planning.knapsack_items import part_candidates
from vllm_gac.planning.losses import Losses, loss_of, read_losses
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.evaluate.perplexity import window_batches
from vllm_gac.texts.tokenizer import ModelTokenizer

_LENGTH = 512
# Of what one part keeps of its half of the cache, and of what all parts keep of all of it.
_OF_A_PART, _OF_ALL = (0.85, 0.75, 0.5, 0.35), (0.75, 0.5, 0.35)
# Of the parameters, with narrower MLPs; of the width of every MLP, as it is probed; and how many
# layers, which lose half of what such a plan loses, are narrowed alone.
_OF_PARAMETERS, _OF_A_WIDTH, _DEAREST = (0.9, 0.8), 0.8, 4
# Layers that may shrink where others are left whole.
_SHRINKING = {"first 2": slice(2, None), "last 2": slice(-2), "first and last 2": slice(2, -2)}

_Allows = Callable[[LayerLayout, LayerLayout], bool]

_ALONE: dict[str, _Allows] = {
    "rotary keys": lambda of, dense: of.value == dense.value and not of.key.is_latent,
    "latent keys": lambda of, dense: of.value == dense.value and not of.key.rope_table,
    "values": lambda of, dense: of.key == dense.key and of.value.heads == dense.value.heads,
    "merged values": lambda of, dense: of.key == dense.key and of.value.heads < dense.value.heads,
}
_TOGETHER: dict[str, _Allows] = {
    "rotary keys, values": lambda of, dense: not of.key.is_latent,
    "all forms": lambda of, dense: True,
}


@dataclass(slots=True)
class _Row:
    """A plan, and the states [count, length, hidden] that its layers have made so far."""

    name: str
    share: float  # of the cache
    layers: Sequence[LayerLayout]
    expected: float
    hidden: list[torch.Tensor] = field(default_factory=list)


def measure_forms(
    model: Path,
    stats: Path,
    texts: Mapping[str, Path],
    out: Path,
    *,
    patterns: Sequence[str],
    max_tokens: int,
    device: str,
    commit: str | None,
) -> None:
    """Write `out`, the result of all rows, and `out` with "_layers" in its name, that of layers.

    Args:
        model: The dense model.
        stats: What `vllm-gac calibrate` wrote for it.
        texts: By their names.
        out: The JSON file.
        patterns: Of the names of rows.
        max_tokens: Of each text.
        device: The torch device.
        commit: Of the sources, where they came without .git.
    """
    checkpoint = open_dense(model)
    statistics = open_statistics(stats, checkpoint)
    losses = read_losses(statistics)
    every = [*_rows(checkpoint, losses), *_narrower(statistics, losses)]
    rows = [row for row in every if any(fnmatch(row.name, p) for p in patterns)]
    about = provenance("benchmarks.real_models", device, commit) | {
        "weights": model.name,
        "answer": "",
    }
    length = min(_LENGTH, checkpoint.config.max_position_embeddings)
    tokenizer = ModelTokenizer(model)
    tokens = {
        text: window_batches(tokenizer, [path], length=length, max_tokens=max_tokens)[0]
        for text, path in texts.items()
    }
    held = statistics.tokens(HELD).long()
    tokens["set aside"] = [*batches(held[: max(1, max_tokens // held.shape[1])])]
    every_text = [*chain.from_iterable(tokens.values())]
    largest = _forward(statistics, rows, every_text, device)
    lines = _compared(checkpoint, rows, tokens, device)
    Result(
        title=f"{model.name}: forms of the cache at equal bytes",
        question="Which form of keys and values loses least for the bytes that it saves?",
        columns=tuple(lines[0]),
        rows=tuple(lines),
        **about,
    ).write(out)
    lines = [
        {"layer": index, "largest activation": largest[index], **_half_of_each(checkpoint, of)}
        for index, of in enumerate(losses)
    ]
    Result(
        title=f"{model.name}: what each layer loses with half the size of one form",
        question="Which layers lose most?",
        columns=tuple(lines[0]),
        rows=tuple(lines),
        **about,
    ).write(out.with_stem(f"{out.stem}_layers"))


def _rows(checkpoint: Checkpoint, losses: Losses) -> list[_Row]:
    """All plans: of one form, of keys and values together, and with layers left whole."""
    everything = range(len(losses))
    rows = []
    for share in _OF_A_PART:
        kept = (1 + share) / 2
        for form, allows in (*_ALONE.items(), ("all forms", _TOGETHER["all forms"])):
            name = f"{form}, cache {kept:.4g}"
            rows += _planned(checkpoint, losses, name, kept, allows, everything)
    for kept in _OF_ALL:
        for form, allows in _TOGETHER.items():
            name = f"{form}, cache {kept:.4g}"
            if name not in [row.name for row in rows]:
                rows += _planned(checkpoint, losses, name, kept, allows, everything)
        for ends, shrinking in _SHRINKING.items() if kept > min(_OF_ALL) else ():
            name = f"all forms, {ends} layers whole, cache {kept:.4g}"
            of_those = everything[shrinking]
            rows += _planned(checkpoint, losses, name, kept, _TOGETHER["all forms"], of_those)
    return rows


def _narrower(stats: Statistics, losses: Losses) -> Iterator[_Row]:
    """Narrower MLPs as planned, in the layers that lose most or in all others, and all alike.

    None without curves.
    """
    if "width" not in losses[0]:
        return
    layout = stats.model.layout
    rows = {}
    for ratio in _OF_PARAMETERS:
        plan = measured_plan(stats, PlanRequest(methods=("prune",), param_ratio=ratio))
        layers = planned_layout(stats.model, plan).layers
        pairs = zip(losses, layers, strict=True)
        lost = [of["width"][layer.intermediate_size] for of, layer in pairs]
        dearest = np.argsort(lost)[-_DEAREST:]
        name = f"MLP, parameters {ratio}"
        rows[name] = layers
        for where, of_those in {f"dearest {_DEAREST} layers": True, "other layers": False}.items():
            rows[f"{name}, {where}"] = [
                layer if (index in dearest) == of_those else dense
                for index, (layer, dense) in enumerate(zip(layers, layout.layers, strict=True))
            ]
    dense = layout.layers[0]
    narrow = replace(dense, intermediate_size=int(_OF_A_WIDTH * dense.intermediate_size))
    rows[f"MLP, width {_OF_A_WIDTH}"] = [narrow] * len(losses)
    for name, layers in rows.items():
        yield _Row(name, 1.0, layers, loss_of(layout, layers, losses))


def _planned(
    checkpoint: Checkpoint,
    losses: Losses,
    name: str,
    kept: float,
    allows: _Allows,
    shrinking: range,
) -> list[_Row]:
    """The best plan with `kept` of the cache, of what a form `allows`; none if there is none."""
    dense = checkpoint.layout
    whole = dense.layers[0]
    known = any(curve.startswith("value2") for curve in losses[0])
    group = None if known else 1
    request = PlanRequest(methods=("heads",), key_group=group, value_group=group)
    (part,) = part_candidates(dense, request, None)
    allowed = [n for n, layer in enumerate(part.layers) if layer == whole or allows(layer, whole)]
    if len(allowed) == 1:
        return []
    only_whole = [part.layers.index(whole)]
    choices = [allowed if index in shrinking else only_whole for index in range(len(losses))]
    costs = [part.costs[numbers, 1:2] for numbers in choices]
    lost = [part.losses(of)[numbers] for of, numbers in zip(losses, choices, strict=True)]
    limit = int(kept * dense.kv_elements)
    if sum(int(cost.min()) for cost in costs) > limit:
        return []
    chosen = choose(costs, [-each for each in lost], {"kv_elements": limit}).positions
    layers = [part.layers[of[n]] for of, n in zip(choices, chosen, strict=True)]
    used = sum(layer.kv_elements for layer in layers) / dense.kv_elements
    expected = float(np.sum([of[n] for of, n in zip(lost, chosen, strict=True)]))
    return [_Row(name, used, layers, expected)]


@torch.inference_mode()
def _forward(
    stats: Statistics,
    rows: list[_Row],
    tokens: Sequence[torch.Tensor],
    device: str,
) -> list[float]:
    """Run all rows, and the dense model as the first of them, which is added.

    Returns the largest number that leaves each dense layer.
    """
    model, dense, largest = reference(stats.model, device=device), stats.model.layout, []
    rows.insert(0, _Row("dense", 1.0, dense.layers, 0.0))
    with stats.model.reader() as read:
        for row in rows:
            row.hidden = list(embed_all(model, read, tokens))
        for index in range(len(dense.layers)):
            weights = layer_weights(model, read, index)
            covariances = shrink_covariances(stats.layer(index, device), stats.measured.tokens)
            frequencies = model.inv_freq * dense.layers[index].has_rope
            layer = MeasuredLayer(dense, weights, covariances, frequencies)
            made: dict[str, Mapping[str, torch.Tensor]] = {f"{dense.layers[index]}": weights}
            for row in rows:
                target = row.layers[index]
                if f"{target}" not in made:
                    made[f"{target}"] = _cast(model, compress_layer(layer, target))
                small = made[f"{target}"]
                row.hidden = [layer_outputs(model, target, small, states) for states in row.hidden]
            largest.append(max(float(states.abs().max()) for states in rows[0].hidden))
            print(f"layer {index}", flush=True)
    return largest


def _cast(model: Reference, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor if name.endswith("rope_inv_freq") else cast(model, tensor)
        for name, tensor in weights.items()
    }


@torch.inference_mode()
def _compared(
    checkpoint: Checkpoint,
    rows: Sequence[_Row],
    tokens: Mapping[str, Sequence[torch.Tensor]],
    device: str,
) -> list[dict[str, Cell]]:
    """A line for each row: what its predictions have in common with the dense model's."""
    model = reference(checkpoint, device=device)
    lines: list[dict[str, Cell]] = [
        {"row": row.name, "KV cache kept": row.share, "expected loss, nats a token": row.expected}
        for row in rows
    ]
    with checkpoint.reader() as read:
        at = 0
        for text, batches in tokens.items():
            sums = np.zeros((len(rows), 2))
            for batch in range(at, at := at + len(batches)):
                for window in range(len(rows[0].hidden[batch])):
                    sums += _divergences(model, read, [row.hidden[batch][window] for row in rows])
            count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in batches)
            for line, (divergence, agreed) in zip(lines, sums / count, strict=True):
                line[f"{text}: divergence, nats a token"] = round(float(divergence), 6)
                line[f"{text}: first choice agrees"] = round(float(agreed), 6)
    return lines


def _divergences(
    model: Reference, read: TensorReader, states: Sequence[torch.Tensor]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sums of a window: [rows, 2] divergence from the first row, and equal first choices."""
    first, sums = None, []
    for each in states:
        log_probs = head(model, read, each)[:-1].log_softmax(-1)
        first = log_probs if first is None else first
        divergence = kl_div(log_probs, first, reduction="sum", log_target=True)
        agreed = (log_probs.argmax(-1) == first.argmax(-1)).sum()
        sums.append((float(divergence), float(agreed)))
    return np.array(sums)


def _half_of_each(checkpoint: Checkpoint, curves: Mapping[str, np.ndarray]) -> dict[str, Cell]:
    """What a layer is expected to lose with half the size of one form, in nats per token."""
    half = checkpoint.layout.head_dim // 2
    forms = {"rotary keys": "rotary1", "latent keys": "latent1", "values": "value1"}
    return {form: float(curves[curve][half]) for form, curve in forms.items()}
