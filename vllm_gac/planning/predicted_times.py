"""What a plan says of predicted times: dense in vLLM, dense on our kernels, and compressed.

Our kernels gain time without compression. The second number is what compression is to be compared
with, and to be had first.
"""

from vllm_gac.planning.plan_file import Plan

# A gain below this share of the dense model's time is none.
_NONE = 0.005


def three_times(plan: Plan) -> str | None:
    """The predicted times of a step; None if there are none. Of older plans, two."""
    if plan.nanoseconds is None:
        return None
    dense, used = plan.nanoseconds.dense, plan.nanoseconds.used
    times = {"dense in vLLM": dense, "dense on our kernels": _noted(plan, "our_kernels")}
    return ", ".join(
        f"{name} {time // 1000:,} us" + ("" if time == dense else f" ({time / dense:.1%})")
        for name, time in {**times, "compressed": used}.items()
        if time is not None
    )


def share_of_our_kernels(plan: Plan) -> float | None:
    """The dense model's time on our kernels, as a share of that in vLLM; None if unknown."""
    ours = _noted(plan, "our_kernels")
    return None if ours is None or plan.nanoseconds is None else ours / plan.nanoseconds.dense


def free_part(plan: Plan) -> list[str]:
    """How to have what our kernels gain without compression, in sentences."""
    ours, one_flag = (_noted(plan, of) for of in ("our_kernels", "attention_backend_gac"))
    if plan.nanoseconds is None or ours is None or one_flag is None:
        return []
    dense, said = plan.nanoseconds.dense, []
    gain = _NONE * dense
    if one_flag < dense - gain:
        said.append(
            f"Free: vllm serve MODEL --attention-backend GAC, {one_flag // 1000:,} us "
            f"({one_flag / dense:.1%})."
        )
    if ours < min(one_flag, dense) - gain:
        said.append(
            "Free: vllm serve MODEL --attention-backend GAC --load-format gac, "
            f"{ours // 1000:,} us ({ours / dense:.1%})."
        )
    return said


def _noted(plan: Plan, of: str) -> int | None:
    """A time of the dense model, in nanoseconds. A plan file may hold any notes."""
    times = plan.notes.get("dense_nanoseconds")
    time = times.get(of) if isinstance(times, dict) else None
    return time if isinstance(time, int) and time > 0 else None
