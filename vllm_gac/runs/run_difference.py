"""How a resumed run differs from the run that it continues, in the words of the command line."""

from collections.abc import Mapping
from typing import Any

_MODEL = "the model's files"
_OPTIONS = {
    "methods": "--method",
    "tensor_parallel_size": "--tp",
    "tool_version": "vllm-gac",
    "torch_version": "PyTorch",
    "threads": "the number of threads",
    "processes": "the number of processes",
    "config_sha256": "config.json",
    "model_config_sha256": "config.json",
}
# The records hold hashes of files instead of what the user gave.
_NOT_AS_GIVEN = ("calibration", "text", "held_out", "heal", "stats", "config_sha256")


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A phrase with the first difference and both of its values; None if nothing differs.

    Both are the `run` of a workspace: options by their names in Python; under "plan" the request
    to the planner or the contents of a plan; under "model" the files of the model.
    """
    if _is_plan(before) != _is_plan(now):
        was, is_now = ("with", "without") if _is_plan(before) else ("without", "with")
        return f"{was} --plan, not {is_now} one"
    for key, value in before.items():
        if now.get(key) != value:  # a key that is missing says the same as null
            return _difference(key, value, now.get(key))
    return None


def _is_plan(run: Mapping[str, Any]) -> bool:
    """Whether the dims came from a plan file."""
    return isinstance(plan := run.get("plan"), Mapping) and "layers" in plan


def _difference(key: str, before: Any, now: Any) -> str:
    if key in ("model", "files"):
        return f"with other contents of {_MODEL}"
    if key == "teacher":
        return "with other contents of the teacher's files"
    if key == "plan" and _is_plan({"plan": before}):
        return "with another --plan"
    while isinstance(before, Mapping) and isinstance(now, Mapping) and key != "stats":
        names = (name for name in {**before, **now} if before.get(name) != now.get(name))
        inner = next(names, None)
        if inner is None:  # null in one of them, and missing in the other
            break
        key = inner if key == "plan" else f"{key}.{inner}"
        before, now = before.get(inner), now.get(inner)
    name = _OPTIONS.get(key) or "--" + key.rpartition(".")[2].replace("_", "-")
    if isinstance(before, bool) and isinstance(now, bool):
        return f"with {name}, not without it" if before else f"without {name}, not with it"
    values = [_text(value) for value in (before, now)]
    if key.rpartition(".")[2] in _NOT_AS_GIVEN or None in values:
        return f"with another {name}"
    return f"with {name} {values[0]}, not {values[1]}"


def _text(value: Any) -> str | None:
    """A value as on the command line; None if it cannot be given there."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if value is None:
        return "left out"
    return str(value) if isinstance(value, (str, int, float)) else None
