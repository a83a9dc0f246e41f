"""Reads the `args` that a Serve config file gives an application."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ray.serve.exceptions import RayServeException

Arguments = TypeVar("Arguments", bound=BaseModel)


def read_arguments(kind: type[Arguments], args: dict[str, Any], known: str) -> Arguments:
    """Check `args` of an application.

    Args:
        kind: What the application takes.
        args: What the file gives it.
        known: The arguments that there are, for the message about one that is unknown.

    Raises:
        RayServeException: `args` is wrong; Serve shows its one sentence as the status.
    """
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("args", *first["loc"])))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"unknown; there are {known}"
        raise RayServeException(f"{field}: {message}") from None
