"""The error of the load tests, printed as one line like every other error of this project."""

from typing import TYPE_CHECKING

from vllm_gac.errors import GacError

if TYPE_CHECKING:
    from pydantic import ValidationError


class LoadTestError(GacError):
    """A scenario, a schedule or the records of a run are malformed or do not fit together."""


def faults(
    error: "ValidationError", whole: str = "the file", inside: tuple[str, ...] = ()
) -> list[str]:
    """Each fault that pydantic found, as "field: reason".

    Args:
        error: What pydantic raised.
        whole: What to call a fault that is of no field.
        inside: The fields around what was validated, outermost first.
    """
    return [
        f"{'.'.join(map(str, (*inside, *fault['loc']))) or whole}: "
        + ("unknown key" if fault["type"] == "extra_forbidden" else fault["msg"])
        for fault in error.errors()
    ]
