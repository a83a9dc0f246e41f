"""Of all ways to lower ranks that pay for padding the others, the one is taken that loses least."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file

from tests.support.dense_models import config
from vllm_gac.alignment.rules import align
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.steps.lower_some_ranks import lowered_layout
from vllm_gac.steps.repair import repair
from vllm_gac.steps.repair_request import RepairRequest

RAW = config()
Q, UP, DOWN = "self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"


def model(directory: Path, *ranks: dict[str, int]) -> Checkpoint:
    """A model of such ranks in each layer, with factors whose columns weigh less and less."""
    dense = layout_of(RAW)
    layers = [
        replace(layer, ranks=MappingProxyType(own))
        for layer, own in zip(dense.layers, ranks, strict=True)
    ]
    layout = replace(dense, layers=tuple(layers))
    gac = {"architectures": ["GacLlamaForCausalLM"], "gac": layout.section()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(RAW | gac))
    generator, tensors = torch.Generator().manual_seed(0), {}
    for number, (name, shape) in enumerate(layout.tensors().items()):
        tensors[name] = torch.randn(shape, generator=generator)
        if name.endswith("B.weight"):
            tensors[name] *= (0.8 + 0.03 * (number % 7)) ** torch.arange(shape[1])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return open_checkpoint(directory)


def spent(layout: ModelLayout) -> int:
    """The parameters of the low-rank linears once all ranks are padded."""
    return sum(
        sum(layout.linear_shape(layer, name)) * align(rank, "minimal", "rank")
        for layer in layout.layers
        for name, rank in layer.ranks.items()
    )


def lost(source: Checkpoint, layout: ModelLayout) -> float:
    total = 0.0
    with source.reader() as read:
        for index, layer in enumerate(layout.layers):
            for name, rank in layer.ranks.items():
                a, b = (read(f"model.layers.{index}.{name}.{x}.weight").double() for x in "AB")
                s = torch.linalg.svdvals(b @ a).square()
                total += float(s[rank:].sum() / s.sum())
    return total


def test_the_choice_is_the_best_of_all_that_spend_no_more(tmp_path: Path) -> None:
    ranks = {Q: 13, UP: 19, DOWN: 20}, {Q: 11, UP: 21, DOWN: 14}
    source = model(tmp_path / "model", *ranks)
    found = lowered_layout(source, RepairRequest(redecompose=True), progress=False)
    before = source.layout.parameters
    whole = layout_of(RAW)
    names = [(index, name) for index, own in enumerate(ranks) for name in own]
    best = float("inf")
    for lowers in itertools.product((False, True), repeat=len(names)):
        own: tuple[dict[str, int], ...] = ({}, {})
        for (index, name), lower in zip(names, lowers, strict=True):
            own[index][name] = ranks[index][name] // 8 * 8 if lower else ranks[index][name]
        layout = replace(
            whole,
            layers=tuple(
                replace(a, ranks=MappingProxyType(b))
                for a, b in zip(whole.layers, own, strict=True)
            ),
        )
        if spent(layout) <= spent_unaligned(source.layout):
            best = min(best, lost(source, layout))
    assert spent(found) <= spent_unaligned(source.layout)
    assert lost(source, found) == pytest.approx(best)
    assert best > 0
    request = RepairRequest(redecompose=True)
    done = repair(source.directory, tmp_path / "out", request, progress=False)
    assert done.after.parameters <= before
    assert all(rank % 8 == 0 for layer in done.after.layers for rank in layer.ranks.values())


def spent_unaligned(layout: ModelLayout) -> int:
    return sum(
        sum(layout.linear_shape(layer, name)) * rank
        for layer in layout.layers
        for name, rank in layer.ranks.items()
    )


def test_a_rank_below_the_first_allowed_one_is_padded(tmp_path: Path) -> None:
    source = model(tmp_path / "model", {Q: 3}, {UP: 5, DOWN: 17})
    layout = lowered_layout(source, RepairRequest(redecompose=True), progress=False)
    assert [dict(layer.ranks) for layer in layout.layers] == [{Q: 3}, {UP: 5, DOWN: 16}]


def test_a_model_of_allowed_ranks_stays(tmp_path: Path) -> None:
    source = model(tmp_path / "model", {Q: 8}, {UP: 24})
    assert lowered_layout(source, RepairRequest(redecompose=True), False) == source.layout
