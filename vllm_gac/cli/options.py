"""Options that several verbs share, and parsers of option values."""

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vllm_gac.errors import GacError
from vllm_gac.options import options_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.texts.hub_texts import is_data_set

Request = TypeVar("Request")

# The type that `ArgumentParser.add_subparsers` returns.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
# A parser, or a section of its --help.
Section: TypeAlias = "argparse._ActionsContainer"

TEXTS = (
    "files of UTF-8 text, .jsonl (gzipped or not) or .parquet with a 'text' or the 'messages' of a "
    "conversation in each line or row, or data sets on the Hub: hf://datasets/ORGANIZATION/NAME"
)
MODEL = "a model directory, or the id of a model on the Hub"
# The options of which a plan needs one: without any, it keeps all of the model.
BUDGETS = ("max_loss", "param_ratio", "kv_ratio", "latency", "latency_ratio")


def add_revision(parser: Section) -> None:
    """Add --revision, for verbs that take a model."""
    parser.add_argument(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit of a model on the Hub; default: main",
    )


def add_json(parser: Section) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def add_planning(
    parser: argparse.ArgumentParser, hidden: Collection[str] = ()
) -> "argparse._ArgumentGroup":
    """Add the options of a `PlanRequest`. One that is not given is None.

    Args:
        parser: The verb's parser.
        hidden: Names of the fields whose options are accepted but not in --help.

    Returns:
        The section of those that say what to keep.
    """
    keep = parser.add_argument_group("what to keep, and how")
    time = parser.add_argument_group("predicted time of the decoder layers, on --gpu")
    # Up to Python 3.12, argparse cannot print a usage without the options of such a group.
    limit = time if "latency" in hidden else time.add_mutually_exclusive_group()
    sections = {"first": parser, "": keep, "time": time, "time limit": limit}
    add_options(PlanRequest, sections, hidden)
    return keep


def add_options(request: type, groups: Mapping[str, Section], hidden: Collection[str] = ()) -> None:
    """Add those options of a request that are of one of the `groups`. One not given is None.

    Those of the fields in `hidden` are accepted but not in --help.
    """
    for name, option in options_of(request).items():
        if option.group not in groups:
            continue
        values: dict[str, Any] = {"choices": option.choices}
        if option.kind == "names":
            values = {"type": names_of(option.choices or ()), "metavar": option.metavar or "M,..."}
        elif option.kind == "switch":
            values = {"action": "store_const", "const": True}
        elif option.kind != "text":
            parse, metavar = _KINDS[option.kind]
            if option.kind == "count" and not option.minimum:
                parse = count
            values = {"type": parse, "metavar": option.metavar or metavar}
        elif option.choices is None:
            values = {"metavar": option.metavar}
        elif isinstance(next(iter(option.choices)), int):
            values["type"] = int
        help_text = argparse.SUPPRESS if name in hidden else option.help
        groups[option.group].add_argument(*option.flags, dest=name, help=help_text, **values)


def request_of(args: argparse.Namespace, request: type[Request]) -> Request:
    """Make a request from the options of `add_options`; what it refuses is wrong usage."""
    try:
        return request(**given(args, *options_of(request)))
    except GacError as e:
        args.usage_error(str(e))
        raise  # usage_error has ended the process


def plan_request(args: argparse.Namespace) -> PlanRequest:
    """Make the request from the options of `add_planning`."""
    return PlanRequest(**given(args, *options_of(PlanRequest)))


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of those options among `names` that were given."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def add_run(parser: Section) -> None:
    """Add the options of a verb that predicts text. An option that is not given is None."""
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="use at most N tokens, as many of each text; default: all",
    )
    parser.add_argument(
        "--sequence-length", type=positive, metavar="N", help="tokens per sequence; default: 512"
    )
    add_device(parser)


def add_device(parser: Section) -> None:
    """Add --device and --quiet."""
    parser.add_argument(
        "--device",
        type=device,
        metavar="DEVICE",
        help="cpu, cuda or cuda:N; default: cuda if there is a GPU, else cpu",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def device_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of `add_device` that were given.

    Raises:
        GacError: If there is no such device.
    """
    if args.device is not None and args.device != "cpu":
        from vllm_gac.compression.devices import prepare_device

        prepare_device(args.device)
    return given(args, "device") | {"progress": not args.quiet}


def add_restart(parser: Section) -> None:
    """Add --resume, for verbs that write a model directory."""
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")


def run_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of those options of `add_run` that were given.

    Raises:
        GacError: If there is no such device.
    """
    return given(args, "max_tokens", "sequence_length") | device_arguments(args)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(_number(int, text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    value = int(_number(int, text))
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(_number(float, text))
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def ratio(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    value = float(_number(float, text))
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def loss(text: str) -> float:
    """Parse a loss of perplexity, as percent or as a share: 1% or 0.01."""
    percent = text.endswith("%")
    value = float(_number(float, text.removesuffix("%"))) / (100 if percent else 1)
    if not 0 < value < 1:
        hint = f"; {text}% is {value / 100:g}" if not percent and 0 < value < 100 else ""
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and below 100 %{hint}")
    return value


def names_of(known: Collection[object]) -> Callable[[str], list[str]]:
    """A parser of some of the `known` names, separated by commas. Repeated names are dropped."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                listed = ", ".join(map(str, known))
                raise argparse.ArgumentTypeError(f"{name!r}: choose from {listed}")
        return list(dict.fromkeys(names))

    return parse


def device(text: str) -> str:
    """Parse a device: cpu, cuda or cuda:N."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: choose cpu, cuda or cuda:N")
    return text


def path(text: str) -> Path:
    """Parse a path that the operating system can have, or the id of a model on the Hub."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    if re.match(r"[A-Za-z][\w+.-]*://", text):  # as a path, its "//" would become "/"
        raise argparse.ArgumentTypeError(
            f"{text} is an address, not a path; a model on the Hub is ORGANIZATION/NAME, and text "
            "on the Hub is hf://datasets/ORGANIZATION/NAME"
        )
    return Path(text)


def text_file(text: str) -> str | Path:
    """Parse the path of a text file, or the name of a data set on the Hub, which is kept as it is.

    Whether a data set's name is well-formed is checked where it is looked up.
    """
    return text if is_data_set(text) else path(text)


def _number(kind: type[int] | type[float], text: str) -> float:
    try:
        return kind(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from e


# The parser of each kind of number, and the name of the value in --help.
_KINDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "ratio": (ratio, "R"),
    "loss": (loss, "LOSS"),
    "count": (positive, "N"),
    "number": (above_zero, "X"),
    "microseconds": (above_zero, "US"),
}
