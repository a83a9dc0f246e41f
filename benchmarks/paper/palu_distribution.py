"""PaLU's ranks before and after aligned selection (the paper's figure 2), on a CPU.

The ranks are those of the demo model's key and value heads of 128 numbers. It has real spectra and
gradients and fits into the repository, but it does not predict the ranks of an 8B model.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from benchmarks.common.figures import axes_grid, by_alignment
from benchmarks.paper.experiment import Result, run, table
from tools.demo_model.llama import Architecture, Llama
from vllm_gac import demo
from vllm_gac.checkpoint.token_text import calibration_sequences
from vllm_gac.planning.knapsack import solve
from vllm_gac.planning.knapsack.problem import KnapsackProblem

# The paper's ratio, and one that leaves fewer heads whole.
RETAINED = (0.8, 0.5)
ALIGNMENTS = (8, 16)
# The paper's algorithm looks so many steps of the alignment around PaLU's rank.
RADIUS = 8
TOKENS, LENGTH = 1 << 14, 512


def measure(tiny: bool) -> Result:
    """Fisher information and whitened spectrum of every key and value head of the demo model."""
    torch.manual_seed(0)
    architecture = Architecture()
    model = Llama(architecture, dropout=0.0)
    state = load_file(demo.MODEL / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    tokens = calibration_sequences(
        demo.MODEL, [demo.CALIBRATION], length=LENGTH, max_tokens=LENGTH if tiny else TOKENS
    )
    heads = {
        f"{index}.{kind}": (layer.self_attn, f"{kind}_proj")
        for index, layer in enumerate(model.model.layers)
        for kind in ("k", "v")
    }
    linears = {name: getattr(attention, linear) for name, (attention, linear) in heads.items()}
    squares, covariances = _observe(model, linears, tokens)
    result: dict[str, list[Any]] = {"names": [], "fisher": [], "spectra": []}
    for name, linear in linears.items():
        rows = linear.weight.detach().double().split(architecture.head_dim)
        information = squares[name].sqrt().split(architecture.head_dim)
        for head, (weight, fisher) in enumerate(zip(rows, information, strict=True)):
            spectrum = torch.linalg.eigvalsh(weight @ covariances[name] @ weight.T).flip(0)
            result["names"].append(f"{name}.{head}")
            result["fisher"].append(float(fisher.mean()))
            result["spectra"].append([float(f"{value:.4e}") for value in spectrum])
    return {"head_dim": architecture.head_dim, "tokens": tokens.numel(), **result}


def _observe(
    model: Llama, linears: Mapping[str, torch.nn.Module], tokens: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """By linear: the mean square of its gradients [out, in], and the covariance of its inputs."""
    sums: dict[str, Any] = dict.fromkeys(linears, 0.0)
    covariances: dict[str, Any] = dict.fromkeys(linears, 0.0)

    def observer(name: str) -> Any:
        def observe(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].detach().flatten(0, -2).double()
            covariances[name] += rows.T @ rows / tokens.numel()

        return observe

    for name, linear in linears.items():
        linear.register_forward_pre_hook(observer(name))
    for sequence in tokens:
        model.zero_grad()
        logits = model(sequence[None, :-1])
        cross_entropy(logits.flatten(0, 1), sequence[1:]).backward()
        for name, linear in linears.items():
            sums[name] += linear.weight.grad.double() ** 2 / len(tokens)
    return sums, covariances


def proportional_ranks(importance: Sequence[float], most: int, total: int) -> list[int]:
    """PaLU's search (Chang et al., ICLR 2025): ranks in proportion to importance.

    Args:
        importance: The importance of each head.
        most: The largest rank.
        total: The sum of the ranks.

    Returns:
        The rank of each head. Fractions, and what exceeds `most`, are distributed one by one.

    Raises:
        ValueError: The heads cannot have `total` ranks.
    """
    if not 0 <= total <= most * len(importance):
        raise ValueError(f"{total} ranks do not fit into {len(importance)} heads of {most}")
    shares = [total * one / sum(importance) for one in importance]
    ranks = [min(most, math.floor(share)) for share in shares]
    in_turn = sorted(range(len(ranks)), key=lambda i: shares[i] - ranks[i])
    while left := total - sum(ranks):
        open_ = [i for i in in_turn if ranks[i] < most]
        for i in open_[:left]:
            ranks[i] += 1
    return ranks


def rounded(ranks: Sequence[int], alignment: int, most: int) -> list[int]:
    """Each rank at its nearest multiple; halves go up. The budget is ignored."""
    return [
        min(most, max(alignment, (2 * rank + alignment) // (2 * alignment) * alignment))
        for rank in ranks
    ]


def selected(
    ranks: Sequence[int], weights: Sequence[float], alignment: int, most: int
) -> list[int]:
    """The paper's knapsack: aligned ranks near `ranks` whose sum is no larger.

    It minimizes the sum of weight x distance from PaLU's rank (scripts/gac_rank_allocation.py in
    the authors' repository).
    """
    items = []
    for index, (rank, weight) in enumerate(zip(ranks, weights, strict=True)):
        near = [rounded([rank], alignment, most)[0] + alignment * step for step in _STEPS]
        candidates = [dim for dim in near if alignment <= dim <= most]
        items.append(
            {
                "name": str(index),
                "candidates": [
                    {"dim": dim, "cost": dim, "value": -weight * abs(dim - rank)}
                    for dim in candidates
                ],
            }
        )
    return _solved(items, sum(ranks))


_STEPS = range(-RADIUS, RADIUS + 1)


def by_energy(lost: Sequence[Sequence[float]], alignment: int, most: int, budget: int) -> list[int]:
    """The aligned ranks within `budget` that minimize the sum of lost[head][rank]."""
    items = [
        {
            "name": str(index),
            "candidates": [
                {"dim": dim, "cost": dim, "value": -curve[dim]}
                for dim in range(alignment, most + 1, alignment)
            ],
        }
        for index, curve in enumerate(lost)
    ]
    return _solved(items, budget)


def _solved(items: list[dict[str, Any]], budget: int) -> list[int]:
    problem = KnapsackProblem.model_validate({"budget": budget, "items": items})
    choice = solve(problem).choice
    return [choice[str(index)] for index in range(len(items))]


def draw(result: Result) -> tuple[str, Figure]:
    """Histograms of the ranks, and the energy that each choice loses."""
    most, fisher = result["head_dim"], result["fisher"]
    lost = lost_energy(result["spectra"], fisher)
    chosen = {ratio: _choices(fisher, lost, most, ratio) for ratio in RETAINED}
    text = (
        f"{len(fisher)} key and value heads of {most} of the demo model (4 layers, 4 KV heads).\n"
        f"Fisher information and spectra (whitened by the inputs) of {result['tokens']} "
        "calibration tokens. Energy lost:\nsquared singular values that are cut off, weighted by "
        "Fisher information. Of the paper's 512 heads of\nLlama-3-8B at a ratio of 0.8, 16 (3.1%) "
        "are multiples of 8.\n\n"
    )
    for ratio, ranks in chosen.items():
        text += f"## A ratio of {ratio}\n\n{_comparison(ranks, lost)}\n"
    return text, _figure(chosen)


def _choices(
    fisher: Sequence[float], lost: Sequence[Sequence[float]], most: int, ratio: float
) -> dict[str, list[int]]:
    """The ranks of all heads by method, PaLU's first."""
    budget = round(ratio * most * len(fisher))
    chosen = {"PaLU": proportional_ranks(fisher, most, budget)}
    for alignment in ALIGNMENTS:
        chosen[f"nearest multiple of {alignment}"] = rounded(chosen["PaLU"], alignment, most)
        chosen[f"the paper's knapsack, {alignment}"] = selected(
            chosen["PaLU"], fisher, alignment, most
        )
        chosen[f"knapsack by energy, {alignment}"] = by_energy(lost, alignment, most, budget)
    return chosen


def _comparison(chosen: Mapping[str, Sequence[int]], lost: Sequence[Sequence[float]]) -> str:
    budget = sum(chosen["PaLU"])
    rows = []
    for name, ranks in chosen.items():
        aligned = sum(rank % 8 == 0 for rank in ranks)
        gone = sum(curve[rank] for curve, rank in zip(lost, ranks, strict=True))
        over = sum(ranks) - budget
        rows.append(
            [
                name,
                f"{min(ranks)}-{max(ranks)}",
                f"{aligned}/{len(ranks)} ({aligned / len(ranks):.0%})",
                sum(ranks),
                f"{over:+d}" if over else "0",
                f"{gone / sum(curve[0] for curve in lost):.3%}",
            ]
        )
    columns = ["ranks", "from-to", "multiples of 8", "sum", "against the budget", "energy lost"]
    return table(columns, rows)


def lost_energy(spectra: Sequence[Sequence[float]], weights: Sequence[float]) -> list[list[float]]:
    """By head and rank from 0: weight x share of the squared singular values beyond the rank."""
    curves = []
    for spectrum, weight in zip(spectra, weights, strict=True):
        energy = np.maximum(spectrum, 0.0)
        tail = np.append(np.cumsum(energy[::-1])[::-1], 0.0)
        curves.append([float(value) for value in weight * tail / tail[0]])
    return curves


def _figure(chosen: Mapping[float, Mapping[str, Sequence[int]]]) -> Figure:
    names = ["PaLU", "the paper's knapsack, 8", "knapsack by energy, 8"]
    figure, all_axes = axes_grid(10.5, 6, rows=len(names), columns=len(chosen))
    for row, name in enumerate(names):
        for axes, (ratio, choices) in zip(
            all_axes[row * len(chosen) :], chosen.items(), strict=False
        ):
            counts = Counter(choices[name])
            dims = sorted(counts)
            axes.bar(dims, [counts[dim] for dim in dims], width=1.6, color=by_alignment(dims))
            aligned = sum(dim % 8 == 0 for dim in choices[name]) / len(choices[name])
            axes.set_title(f"{name}, ratio {ratio}: {aligned:.0%} aligned")
            axes.set(xlim=(0, 132), xticks=range(0, 129, 16), ylabel="heads")
    for axes in all_axes[-len(chosen) :]:
        axes.set_xlabel("rank of a head")
    return figure


if __name__ == "__main__":
    run("PaLU's ranks before and after aligned selection", measure, draw, needs_gpu=False)
