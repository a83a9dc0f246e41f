"""Print how much of its budgets a plan uses, its expected loss, and why a budget is not used up."""

from typing import TYPE_CHECKING

from vllm_gac.errors.shown import sentence
from vllm_gac.planning.loss_range import perplexity_range

if TYPE_CHECKING:
    from vllm_gac.planning.plan_file import Plan, PlanBudget

# The rest of a budget is explained if it is at least this share of the dense model.
_WORTH_A_WORD = 0.005


def print_budgets(plan: "Plan") -> None:
    """Print one line for each budget, and one for the expected loss."""
    budgets: list[tuple[str, str, PlanBudget, int, str]] = [
        ("parameters", "parameters", plan.parameters, 1, ""),
        ("KV cache", "kv_elements", plan.kv_elements, 1, " numbers per token"),
    ]
    if plan.nanoseconds is not None:
        unit = " us a step of the decoder layers"
        budgets.append(("time", "nanoseconds", plan.nanoseconds, 1000, unit))
    for name, key, budget, unit_size, unit in budgets:
        left = budget.allowed - budget.used
        print(
            f"{name:13}  {budget.used // unit_size:,} of {budget.allowed // unit_size:,} allowed"
            f"{unit}, {budget.used / budget.dense:.1%} of dense, {left // unit_size:,} left"
        )
        if left >= _WORTH_A_WORD * budget.dense and (why := _why_left(plan, key)):
            print(f"{'':13}  {why}")
    for text in _about_times(plan):
        print(f"{'':13}  {text[:1].upper()}{text[1:]}.")
    measured = plan.expected_loss is not None
    loss = plan.expected_loss if measured else plan.notes.get("expected_loss")
    if isinstance(loss, int | float):
        source = (
            "measured on this model" if measured else "estimated from other models, not measured"
        )
        print(f"{'expected loss':13}  {loss:.4f} nats per token ({source})")
        if measured:
            print(f"{'':13}  On other text: {perplexity_range(loss)}, by the project's own trials.")


def _about_times(plan: "Plan") -> list[str]:
    """What the plan notes about its predicted times. A plan file may hold any notes."""
    found = plan.notes.get("times")
    if not isinstance(found, list):
        return []
    return [sentence(text) for text in found if isinstance(text, str)]


def _why_left(plan: "Plan", budget: str) -> str | None:
    """Explain why part of a budget is unused. Returns None if the plan does not tell."""
    limits = plan.notes.get("limited_by")
    if not isinstance(limits, dict) or not isinstance(limits.get(budget), list):
        return None
    names = {"parameters": "parameters", "kv_elements": "KV cache", "nanoseconds": "time"}
    by = [names[name] for name in limits[budget] if name in names]
    if not by:
        return "No part can become larger, so the rest cannot lower the expected loss."
    if by == [names.get(budget)]:
        return "The next larger dims need more than what is left."
    objective = plan.notes.get("objective", "concave")
    worse = "does not lower the expected loss"
    if objective != "concave":
        worse = f"does not raise the objective {objective}"
    return f"The {' and '.join(by)} budget is the limit: within it, using more here {worse}."
