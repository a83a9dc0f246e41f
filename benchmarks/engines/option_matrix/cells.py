"""What is served: one engine a cell, and how far from the reference it may be, or its refusal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.option_matrix.pairs import Pair, Row, all_pairs

ADAPTER = "adapter"
# Of a logprob. In bf16 as in tests/serving/agreement.py; every model is stored in bf16 or fp32, so
# that nothing but the order of sums differs in fp32.
ALLOWED = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25}
# With an adapter of tests/serving/adapters.py, by dtype: mean over steps of the largest error of a
# top logprob, over the spread of a step's logprobs. Such an adapter is as large as the weights, and
# what it makes of a model rounds much more: the plain torch reference of the merged models in bf16
# is off from itself in fp32 by 0.05 to 0.25 of the spread (a logprob by up to 4.7; of the models
# themselves, by 0.12), and in fp32 with no more than the adapter's factors rounded to bf16 by up to
# 0.09 (1.0). With the adapter of one linear of one layer left out it is 0.44 at least. fp16 rounds
# seven times less. In fp32 ALLOWED holds with adapters too: "every shape" is served with one off by
# 1e-4, twelve times as far as without (9e-6), and just so in bf16 (0.65, and 0.06).
ADAPTED_ALLOWED = {"float16": 0.05, "bfloat16": 0.3}
# Activations of int8 and fp8 linears are rounded: mean error over the spread of the logprobs.
ROUNDED_ALLOWED = 0.2


@dataclass(frozen=True)
class Level:
    """What a level of a factor asks of vLLM."""

    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    rounds: bool = False  # activations or the cache, to 8 bits


@dataclass(frozen=True)
class Cell:
    """One engine. With `refused`, a pattern that its refusal must match."""

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
        """The model that it must answer as."""
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
        """The mean error allowed, over the spread, where a largest error says nothing."""
        if self.adapter and self.options["dtype"] in ADAPTED_ALLOWED:
            return ADAPTED_ALLOWED[self.options["dtype"]]
        rounds = self.rounds or self.model.endswith("int8")
        return ROUNDED_ALLOWED if rounds else None

    @property
    def models(self) -> list[str]:
        """The kinds that must be made for it, what they are made of first."""
        kinds = [self.model.removesuffix(" int8"), self.model]
        if self.adapter:
            kinds.append(f"{self.model} {ADAPTER}")
        kinds += filter(
            None, (self.options.get("speculative_config", {}).get("model"), self.against)
        )
        return kinds


Factors = Mapping[str, Mapping[str, Level]]


def rows_of(factors: Factors, impossible: Mapping[str, list[Row]]) -> tuple[list[Row], list[Pair]]:
    """All pairs of `factors` but for rows that hold one of `impossible`, which is by reason."""

    def allowed(row: Row) -> bool:
        return not any(
            row.items() >= forbidden.items()
            for several in impossible.values()
            for forbidden in several
        )

    return all_pairs({name: list(levels) for name, levels in factors.items()}, allowed)


def cells_of(rows: list[Row], factors: Factors, common: Mapping[str, Any]) -> list[Cell]:
    """A cell of each row; its name is its levels but for those that stand first."""
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
