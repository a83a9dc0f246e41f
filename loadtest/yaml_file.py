"""YAML files of a user -> pydantic models, every fault in one line."""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from loadtest.errors import LoadTestError, faults

Model = TypeVar("Model", bound=BaseModel)


def load_yaml(path: Path, model: type[Model], **overrides: object) -> Model:
    """Read `path` as a `model`; `overrides` that are not None replace what it says.

    Raises LoadTestError naming the file, the overrides and every field that is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadTestError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise LoadTestError(f"{path}: not a readable YAML file: nested too deeply") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise LoadTestError(f"{path}: not a readable YAML file: {reason}") from error
    if not isinstance(content, dict):
        raise LoadTestError(f"{path}: expected a mapping of fields, got {type(content).__name__}")
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return model.model_validate(content | given)
    except ValidationError as error:
        instead = ", ".join(f"{key} {value}" for key, value in given.items())
        where = f"{path} with {instead}" if instead else str(path)
        raise LoadTestError(f"{where}: {'; '.join(faults(error, whole=''))}") from error
