"""The input of `vllm-gac solve`, as pydantic models."""

from collections import Counter
from typing import Annotated

from pydantic import Field, model_validator

from vllm_gac.layout.schema import Count, StrictModel, between


class KnapsackCandidate(StrictModel):
    """One dim that an item may take, with its value and its cost under one budget or several."""

    dim: Annotated[int, Field(ge=0, le=1 << 53)]
    # These bounds keep the sum over all items finite.
    value: Annotated[float, between(-1e302, 1e302)]
    cost: Count | None = None
    costs: dict[str, Count] | None = None


class KnapsackItem(StrictModel):
    """One tensor or layer. Exactly one of its candidates is chosen."""

    name: str
    candidates: Annotated[list[KnapsackCandidate], Field(min_length=1, max_length=10_000)]


class KnapsackProblem(StrictModel):
    """Input of `vllm-gac solve`: `budget` and `cost`, or `budgets` and `costs` by name."""

    items: Annotated[list[KnapsackItem], Field(min_length=1, max_length=50_000)]
    budget: Count | None = None
    # A plan has three budgets. With more budgets, fewer choices dominate others, so the search
    # takes longer.
    budgets: Annotated[dict[str, Count], Field(max_length=4)] | None = None

    @model_validator(mode="after")
    def _costs_match_budgets(self) -> "KnapsackProblem":
        if (self.budget is None) == (self.budgets is None):
            raise ValueError("exactly one of 'budget' and 'budgets' must be given")
        if self.budgets is not None and not self.budgets:
            raise ValueError("'budgets' is empty")
        name, times = Counter(item.name for item in self.items).most_common(1)[0]
        if times > 1:
            raise ValueError(f"item name {name!r} appears {times} times")
        for item in self.items:
            for candidate in item.candidates:
                if fault := self._cost_fault(candidate):
                    raise ValueError(f"item {item.name!r}, dim {candidate.dim}: {fault}")
        return self

    def _cost_fault(self, candidate: KnapsackCandidate) -> str | None:
        if self.budgets is None:
            ok = candidate.cost is not None and candidate.costs is None
            return None if ok else "with 'budget' a candidate needs 'cost' and no 'costs'"
        if candidate.costs is None or candidate.cost is not None:
            return "with 'budgets' a candidate needs 'costs' and no 'cost'"
        if candidate.costs.keys() != self.budgets.keys():
            return f"costs for {sorted(candidate.costs)}, budgets are {sorted(self.budgets)}"
        return None
