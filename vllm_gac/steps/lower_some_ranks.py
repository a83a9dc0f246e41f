"""Choose which ranks of a model go down to an allowed one, so that the others may be padded.

Padding is exact and costs parameters. A rank that goes down saves some, and loses the smallest
singular values of the linear's product. An exact knapsack chooses, for all low-rank linear layers
together: at most as many parameters as before, and the least loss, as the sum of the squared shares
of their Frobenius norms. No rank goes further than to the next allowed one, up or down: what the
factors dropped is not in them, so that more rank would be zeros.
"""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from tqdm import tqdm

from vllm_gac.alignment import rules
from vllm_gac.alignment.lowered_ranks import singular_values
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.planning.knapsack import choose
from vllm_gac.steps.repair_request import RepairRequest


def lowered_layout(source: Checkpoint, request: RepairRequest, progress: bool) -> ModelLayout:
    """The layout of `source` with those ranks lowered that pay for padding the others.

    A rank that is to be padded stays as it is.

    Args:
        source: A model.
        request: Which dims are allowed.
        progress: Whether to show a progress bar on stderr.
    """
    layout = source.layout
    names, costs, losses, limit = [], [], [], 0
    with source.reader() as read, torch.inference_mode():
        for index in tqdm(
            range(len(layout.layers)), "singular values", unit="layer", disable=not progress
        ):
            for name, rank in layout.layers[index].ranks.items():
                sizes = layout.linear_shape(layout.layers[index], name)
                choices = _choices(rank, min(sizes), request)
                if choices == [rank]:
                    continue
                lost = _lost(read, f"model.layers.{index}.{name}", choices)
                names.append((index, name, choices))
                costs.append(sum(sizes) * np.array([choices], dtype=np.int64).T)
                losses.append(-lost)
                limit += sum(sizes) * rank
    if not names:
        return layout
    # Ranks below the first allowed one can only be padded.
    limit = max(limit, sum(int(cost.min()) for cost in costs))
    chosen, _ = choose(costs, losses, {"parameters": limit})
    layers = list(layout.layers)
    for (index, name, choices), position in zip(names, chosen, strict=True):
        lower = min(layers[index].ranks[name], choices[position])
        ranks = MappingProxyType({**layers[index].ranks, name: lower})
        layers[index] = replace(layers[index], ranks=ranks)
    return replace(layout, layers=tuple(layers))


def _choices(rank: int, full: int, request: RepairRequest) -> list[int]:
    """The allowed ranks next to `rank`, below and above; `rank` itself if it is allowed."""
    strategy, gpu, multiple = request.strategy, request.gpu, request.multiples.linear
    padded = min(rules.align(rank, strategy, "rank", gpu, multiple=multiple), full)
    if padded == rank:
        return [rank]
    below = max(rules.allowed_dims(1, rank, strategy, "rank", gpu, multiple=multiple), default=None)
    return [padded] if below is None else [below, padded]


def _lost(read: TensorReader, linear: str, choices: list[int]) -> np.ndarray:
    """[choices]: the share of the squared norm of a linear that is lost at each rank."""
    energy = singular_values(read(f"{linear}.A.weight"), read(f"{linear}.B.weight")).square()
    whole = float(energy.sum()) or 1.0
    return np.array([float(energy[rank:].sum()) / whole for rank in choices])
