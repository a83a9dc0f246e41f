"""A scenario in YAML: the traffic to generate, and the SLOs that answers should meet."""

from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from loadtest.errors import LoadTestError, faults
from loadtest.traffic.arrivals import Preset
from loadtest.traffic.lengths import length_table

Model = TypeVar("Model", bound=BaseModel)
_SHIPPED = Path(__file__).parents[1] / "scenarios"

Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]


class Strict(BaseModel):
    """What a file says, where an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FixedLengths(Strict):
    """All requests have the same lengths: for calibration and for comparison with other tools."""

    input: Tokens
    output: Tokens


class Scale(Strict):
    """Factors on the lengths. They shrink a production trace to fit a small model."""

    input: Annotated[float, Field(gt=0, le=100)] = 1.0
    output: Annotated[float, Field(gt=0, le=100)] = 1.0


class SharedPrefixes(Strict):
    """`share` of the requests start with one of `groups` system prompts of `blocks` blocks.

    Group k is used in proportion to 1 / k (Zipf). The lengths of prompts do not change.
    """

    share: Fraction
    groups: Annotated[int, Field(strict=True, ge=1, le=100_000)]
    blocks: Annotated[int, Field(strict=True, ge=1, le=10_000)]


class Sessions(Strict):
    """Requests come in conversations of a mean of `turns` turns (geometric).

    The prompt of a turn is that of the turn before, its answer, and a message of a mean of
    `message` tokens (exponential). A turn is due a mean of `think` seconds (exponential) after the
    answer before it. A session ends early where its next turn does not fit the context.
    """

    turns: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]
    think: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
    message: Tokens


class Slo(Strict):
    """What a request must meet to count as good, in seconds. TTFT counts from when it was due."""

    ttft: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    tpot: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.05


class Scenario(Strict):
    """One scenario file. Rates are in requests per second, times in seconds, lengths in tokens.

    With sessions, `lengths` are those of first prompts and of all answers, `arrivals` those
    of the sessions' starts. Then there are at most `rate` requests per second: fewer in the
    beginning, and where answers take long.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    description: str = ""
    lengths: str | FixedLengths
    rate: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
    duration: Seconds
    arrivals: Preset = "poisson"
    prefixes: SharedPrefixes | None = None
    sessions: Sessions | None = None
    scale: Scale = Scale()
    max_model_len: Tokens | None = None
    # The block size of Mooncake. A schedule for a small model needs smaller blocks.
    block_tokens: Annotated[int, Field(strict=True, ge=1, le=65536)] = 512
    # Token ids of prompts are drawn from [low, high). This range lies inside small vocabularies and
    # avoids special tokens, which most tokenizers keep at either end.
    vocabulary: tuple[Tokens, Tokens] = (256, 4096)
    seed: Annotated[int, Field(strict=True, ge=0, le=(1 << 63) - 1)] = 0
    slo: Slo = Slo()

    @field_validator("lengths")
    @classmethod
    def _table_exists(cls, lengths: str | FixedLengths) -> str | FixedLengths:
        if isinstance(lengths, str):
            length_table(lengths)
        return lengths

    @field_validator("vocabulary")
    @classmethod
    def _vocabulary_is_wide(cls, vocabulary: tuple[int, int]) -> tuple[int, int]:
        if vocabulary[1] - vocabulary[0] < 16:
            raise ValueError("vocabulary must span at least 16 token ids")
        return vocabulary


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


def find_scenario(name: str) -> Path:
    """The file of the shipped scenario `name`, or `name` itself if it is a .yaml file."""
    if name.endswith(".yaml"):
        return Path(name)
    path = _SHIPPED / f"{name}.yaml"
    if not path.exists():
        names = ", ".join(sorted(shipped.stem for shipped in _SHIPPED.glob("*.yaml")))
        raise LoadTestError(f"no scenario {name!r}; there are {names}")
    return path
