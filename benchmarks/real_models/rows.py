"""The rows of the table: how a model is compressed, by name, and how a name is read."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from vllm_gac.errors import GacError

DENSE, OWN_ATTENTION, HEALED = "dense", "dense, our attention", ", healed"
INT4 = "W4A16"
_ALL = ("--method", "heads,prune,lowrank")
# Of half of HumanEval; the other half is what such a row is judged by.
_SCORE = f"{sys.executable} -m benchmarks.real_models score {{problems}}"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to make a model smaller.

    Attributes:
        options: Of `vllm-gac plan`, or with a loss that is asked for of `vllm-gac compress`; None:
            the dense model. {problems} stands for the directory of HumanEval.
        healed: Whether the compressed model is trained by `vllm-gac heal`.
        int4: Whether the dense model's weights are int4 before that.
    """

    options: Sequence[str] | None
    healed: bool = False
    int4: bool = False

    @property
    def compressed(self) -> bool:
        """Whether the row is of a model that vllm-gac writes."""
        return self.options is not None


def _planned(param: float | None, kv: float | None, *options: str) -> Row:
    ratios: list[str] = []
    for flag, ratio in (("--param-ratio", param), ("--kv-ratio", kv)):
        ratios += [] if ratio is None else [flag, f"{ratio}"]
    return Row([*ratios, *options])


_CACHES = (".75", ".5", ".85", ".65", ".6")
_COMPRESSED = {
    **{f"KV {kv}": _planned(None, float(kv), "--method", "heads") for kv in _CACHES},
    "heads + MLP .9, KV .75": _planned(0.9, 0.75),
    "all methods .9, KV .75": _planned(0.9, 0.75, *_ALL),
    "heads + MLP .95, KV .75": _planned(0.95, 0.75),
    "heads + MLP .8, KV .75": _planned(0.8, 0.75),
    "heads + MLP .9, KV .5": _planned(0.9, 0.5),
    "all methods .8, KV .5": _planned(0.8, 0.5, *_ALL),
    "low rank .9": _planned(0.9, None, "--method", "lowrank"),
    "low rank .8": _planned(0.8, None, "--method", "lowrank"),
    "MLP .9": _planned(0.9, None, "--method", "prune"),
    "MLP .8": _planned(0.8, None, "--method", "prune"),
    **{f"asked .{share}": Row(["--max-loss", f"0.{share}"]) for share in ("005", "01", "02", "05")},
    "asked score .03": Row(["--max-loss", "0.03", "--score", _SCORE]),
    "KV .5, rotary": _planned(None, 0.5, "--method", "heads", "--key-form", "rotary"),
    "KV .5, latent": _planned(None, 0.5, "--method", "heads", "--key-form", "latent"),
    "KV .5, rotary, nothing merged": _planned(
        *(None, 0.5, "--method", "heads", "--key-form", "rotary"),
        *("--key-group", "1", "--value-group", "1"),
    ),
}

_INT4 = {f"{INT4}, {name}": replace(_COMPRESSED[name], int4=True) for name in ("KV .75", "KV .5")}

ROWS = {
    DENSE: Row(None),
    OWN_ATTENTION: Row(None),
    **_COMPRESSED,
    INT4: Row(None, int4=True),
    **_INT4,
    **{f"{name}{HEALED}": replace(row, healed=True) for name, row in (_COMPRESSED | _INT4).items()},
}


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of ROWS that match the `patterns`, in their order.

    Raises GacError for a pattern without any.
    """
    matching: list[str] = []
    for pattern in patterns:
        names = [name for name in ROWS if fnmatch(name, pattern)]
        if not names:
            raise GacError(f"--rows {pattern}: no such row; there are {'; '.join(ROWS)}")
        matching += names
    return list(dict.fromkeys(matching))
