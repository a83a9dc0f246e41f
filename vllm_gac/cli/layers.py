"""Print a model's layers as a table."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from vllm_gac.cli.output import print_table


def print_layers(layers: Sequence[dict[str, Any]]) -> None:
    """Print one row for each run of equal layers. `layers` are as in config.json."""
    print_table(("layers", "keys", "values", "MLP width", "ranks"), list(_rows(layers)))


def _rows(layers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for layer, numbers in groupby(range(len(layers)), key=layers.__getitem__):
        first, *rest = numbers
        key, value = layer["key"], layer["value"]
        ranks = [f"{name.split('.')[1]} {rank}" for name, rank in layer["ranks"].items()]
        yield (
            f"{first}-{rest[-1]}" if rest else str(first),
            f"{key['form']} {key['heads']} x {key['size']}",
            f"{value['heads']} x {value['size']}",
            str(layer["intermediate_size"]),
            ", ".join(ranks) or "-",
        )
