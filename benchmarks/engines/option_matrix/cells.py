"""A cell of the matrix: one engine, and its allowed error or its expected refusal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.option_matrix.pairs import Pair, Row, all_pairs

ADAPTER = "adapter"
# The allowed error of a logprob. For bf16 it is that of tests/serving/agreement.py. Every model is
# stored in bf16 or fp32, so that in fp32 only the order of sums differs.
ALLOWED = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25}
# The allowed error with an adapter of tests/serving/adapters.py, by dtype: the mean over steps of
# the largest error of a top logprob, divided by the spread of a step's logprobs. Such an adapter is
# as large as the weights, and the adapted model rounds much more. With the torch reference of the
# merged models, as a share of the spread: bf16 differs from fp32 by 0.05 to 0.25 (a logprob by up
# to 4.7; without an adapter by 0.12). Rounding only the factors of the adapter to bf16 gives up to
# 0.09 (a logprob: 1.0). Leaving out the adapter of one linear of one layer gives at least 0.44.
# fp16 rounds seven times less. In fp32, ALLOWED holds with adapters, too: the error of "every
# shape" is 1e-4 with one and 9e-6 without, a ratio like that in bf16 (0.65 and 0.06).
ADAPTED_ALLOWED = {"float16": 0.05, "bfloat16": 0.3}
# int8 and fp8 linears round activations: the allowed mean error over the spread of the logprobs.
ROUNDED_ALLOWED = 0.2


@dataclass(frozen=True)
class Level:
    """The options and environment that a level of a factor adds."""

    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    rounds: bool = False  # whether it rounds activations or the cache to 8 bits


@dataclass(frozen=True)
class Cell:
    """One engine. If `refused` is set, the engine must be refused in a text that it matches."""

    name: str
    model: str
    options: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    ask: str = "generate"
    against: str | None = None
    refused: str | None = None
    rounds: bool = False

    @property
    def adapter(self) -> bool:
        return bool(self.options.get("enable_lora"))

    @property
    def reference(self) -> str:
        """The model whose answers are expected."""
        if self.adapter:
            return f"{self.model} merged"
        rounded = f"{self.model} rounded" if self.model.endswith("int8") else self.model
        return self.against or rounded

    @property
    def allowed(self) -> float:
        cached = ALLOWED.get(self.options.get("kv_cache_dtype", "auto"), 0.0)
        return max(ALLOWED[self.options["dtype"]], cached)

    @property
    def mean_error(self) -> float | None:
        """The allowed mean error over the spread, where the largest error is no measure."""
        if self.adapter and self.options["dtype"] in ADAPTED_ALLOWED:
            return ADAPTED_ALLOWED[self.options["dtype"]]
        rounds = self.rounds or self.model.endswith("int8")
        return ROUNDED_ALLOWED if rounds else None

    @property
    def models(self) -> list[str]:
        """The kinds of models to make for the cell; a model comes after those it is made from."""
        kinds = [self.model.removesuffix(" int8"), self.model]
        if self.adapter:
            kinds.append(f"{self.model} {ADAPTER}")
        kinds += filter(
            None, (self.options.get("speculative_config", {}).get("model"), self.against)
        )
        return kinds


Factors = Mapping[str, Mapping[str, Level]]


def rows_of(factors: Factors, impossible: Mapping[str, list[Row]]) -> tuple[list[Row], list[Pair]]:
    """Rows with all pairs of `factors`, without rows that contain one of `impossible`."""

    def allowed(row: Row) -> bool:
        return not any(
            row.items() >= forbidden.items()
            for several in impossible.values()
            for forbidden in several
        )

    return all_pairs({name: list(levels) for name, levels in factors.items()}, allowed)


def cells_of(rows: list[Row], factors: Factors, common: Mapping[str, Any]) -> list[Cell]:
    """A cell for each row, named by its levels except the first level of each factor."""
    cells = []
    for row in rows:
        levels = [factors[factor][level] for factor, level in row.items() if factor != "model"]
        options, env = dict(common), dict[str, str]()
        for level in levels:
            options |= level.options
            env |= level.env
        unusual = [
            level
            for factor, level in row.items()
            if factor == "ranks" or level != next(iter(factors[factor]))
        ]
        name = ", ".join([row["model"], *(x for x in unusual if x != row["model"])])
        rounds = any(level.rounds for level in levels)
        cells.append(Cell(name, row["model"], options, env, rounds=rounds))
    return cells
