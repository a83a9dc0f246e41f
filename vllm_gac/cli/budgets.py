"""Print how much of its budgets a plan uses, and its expected loss."""

from typing import TYPE_CHECKING

from vllm_gac.errors.sanitize import sentence
from vllm_gac.planning.expected_loss import in_words
from vllm_gac.planning.predicted_times import free_part, three_times

if TYPE_CHECKING:
    from vllm_gac.planning.plan_file import Plan, PlanBudget


def print_budgets(plan: "Plan") -> None:
    """Print one line for each budget, and one for the expected loss."""
    budgets: list[tuple[str, PlanBudget, int, str]] = [
        ("parameters", plan.parameters, 1, ""),
        ("KV cache", plan.kv_elements, 1, " numbers per token"),
    ]
    if plan.nanoseconds is not None:
        unit = " us a step of the decoder layers"
        budgets.append(("time", plan.nanoseconds, 1000, unit))
    for name, budget, unit_size, unit in budgets:
        left = budget.allowed - budget.used
        used, is_time = f"{budget.used // unit_size:,}", name == "time"
        share = "" if is_time else f", {budget.used / budget.dense:.1%} of dense"
        if is_time and plan.notes.get("time_limit") == "none":
            print(f"{name:13}  {used}{unit}")
        else:
            allowed = f"{budget.allowed // unit_size:,} allowed{unit}"
            print(f"{name:13}  {used} of {allowed}{share}, {left // unit_size:,} left")
    if (times := three_times(plan)) is not None:
        for text in (f"{times}.", *free_part(plan)):
            print(f"{'':13}  {text[:1].upper()}{text[1:]}")
    if isinstance(deployment := plan.notes.get("deployment"), str):
        print(f"{'':13}  Predicted for {sentence(deployment)}.")
    for text in _about_times(plan):
        print(f"{'':13}  {text[:1].upper()}{text[1:]}.")
    if plan.expected_loss is not None:
        said = in_words(plan.expected_loss, plan.notes.get("expected_interval"))
        print(f"{'expected loss':13}  By probes of this model: {said}.")
        print(f"{'':13}  On text like the calibration's; tasks lose far more.")
    elif isinstance(loss := plan.notes.get("expected_loss"), int | float):
        print(f"{'expected loss':13}  {loss:.4f} nats per token, estimated from other models")
    if isinstance(keys := plan.notes.get("fp8_keys_loss"), float):
        print(f"{'':13}  Rounding keys to FP8 is expected to lose {keys:.4f} more.")
    held = _bytes(plan)
    if held is not None:
        print(
            f"{'bytes':13}  {held[0]:,} of weights and of the cache of all sequences, "
            f"{held[0] / held[1]:.1%} of dense"
        )
    if isinstance(max_loss := plan.notes.get("max_loss"), float):
        best = "fastest" if held is None else "smallest"
        print(
            f"{'asked':13}  perplexity at most {max_loss:.2%} higher: the {best} plan that is "
            "expected to keep to it"
        )


def _bytes(plan: "Plan") -> tuple[int, int] | None:
    """The plan's bytes and the dense model's, if they were to be the fewest."""
    match plan.notes.get("bytes"):
        case {"used": int(used), "dense": int(dense)} if dense > 0:
            return used, dense
    return None


def _about_times(plan: "Plan") -> list[str]:
    """What the plan notes about its predicted times. A plan file may hold any notes."""
    notes = plan.notes.get("times")
    if not isinstance(notes, list):
        return []
    return [sentence(text) for text in notes if isinstance(text, str)]
