"""Models in the form of Basis Sharing."""

import re
from typing import Any

from torch import nn

from tests.importers.tools import LINEARS, TwoLinears, dense, replace
from tests.support.dense_models import config

SHORT = {name: name.split(".")[1].removesuffix("_proj") for name in LINEARS}
NUM_BASIS = {"q": 12, "k": 7, "v": 9, "o": 10, "gate": 14, "up": 13, "down": 40}
PAIRS = [[0, 1], [2, 3]]
GROUPS = {"q": PAIRS, "k": PAIRS, "v": PAIRS, "o": [[0], [1], [2], [3]], "gate": [[0, 1, 2], [3]],
          "up": PAIRS, "down": [[0], [1], [2], [3]]}  # fmt: skip
FOUR_LAYERS = config(num_hidden_layers=4)


def basis_sharing(
    raw: dict[str, Any], groups: dict[str, list[list[int]]]
) -> tuple[dict[str, Any], nn.Module]:
    """The config.json that the tool writes, and the model. The layers of a group share a basis."""
    model = dense(raw)
    written = {**raw, "architectures": ["ShareLlamaForCausalLM"]}
    for name, short in SHORT.items():
        written |= {f"num_basis_{short}": NUM_BASIS[short], f"{short}_groups": groups[short]}
        for group in groups[short]:
            for layer in group:
                full = f"model.layers.{layer}.{name}"
                replace(model, full, lambda x, r=NUM_BASIS[short]: TwoLinears(x, r, "basis", "own"))
                first = model.get_submodule(f"model.layers.{group[0]}.{name}")
                model.get_submodule(full).basis = first.basis
    return written, model


def own_name(name: str) -> str:
    """The name in LowRankArena and FlashSVD: the basis is next to each layer's own factor."""
    return re.sub(r"(\w+)_proj\.basis", r"\1_basis", name).replace("_proj.own", "_proj")


def model_name(name: str) -> str:
    """The name in the Mistral variant: the basis is in a collection of the model."""
    name = re.sub(r"layers\.(\d+)\.\w+\.(\w+)_proj\.basis", r"\2_basis.\1", name)
    return name.replace("_proj.own", "_proj")
