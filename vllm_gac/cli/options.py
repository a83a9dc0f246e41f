"""Options that several verbs share, and parsers of option values."""

import argparse
import re
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vllm_gac.errors import GacError
from vllm_gac.options import Option, options_of
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
# The name of the value in --help, by the kind of an option.
_METAVARS = {
    "ratio": "R",
    "loss": "LOSS",
    "count": "N",
    "number": "X",
    "microseconds": "US",
    "names": "M,...",
}
# The options of which a plan needs one: without any, it keeps all of the model.
BUDGETS = ("max_loss", "param_ratio", "kv_ratio", "latency", "latency_ratio")


def add_model(parser: Section, name: str = "model") -> None:
    """Add the model that a verb reads, and --revision."""
    add_path(parser, name, "MODEL", MODEL)
    add_revision(parser)


def add_path(parser: Section, name: str, metavar: str, help_text: str, **more: Any) -> None:
    """Add an argument, or an option that begins with --, that takes a path."""
    parser.add_argument(name, type=path, metavar=metavar, help=help_text, **more)


def add_revision(
    parser: Section,
    flag: str = "--revision",
    help_text: str = "branch, tag or commit of a model on the Hub; default: main",
) -> None:
    """Add --revision, for verbs that take a model."""
    parser.add_argument(flag, metavar="REVISION", help=help_text)


def add_texts(parser: Section, flag: str, help_text: str = TEXTS, **more: Any) -> None:
    """Add an option that takes texts."""
    parser.add_argument(flag, nargs="+", type=text_file, metavar="FILE", help=help_text, **more)


def add_out(parser: Section) -> None:
    """Add --out, for verbs that write a model directory."""
    add_path(parser, "--out", "DIR", "output directory", required=True)


def add_resume(parser: argparse.ArgumentParser, section: "Section | None" = None) -> None:
    """Add --resume and --json, for verbs that write a model directory."""
    section = section or parser
    section.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    add_json(section)
    parser.set_defaults(hint="; the same command with --resume goes on from here")


def add_json(parser: Section) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def add_quiet(parser: Section) -> None:
    """Add --quiet."""
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def shows_progress(args: argparse.Namespace) -> bool:
    """Whether to show progress bars: on a terminal, without --quiet. Logs have a line a phase."""
    return sys.stderr is not None and sys.stderr.isatty() and not getattr(args, "quiet", False)


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
        if option.group in groups:
            add_option(groups[option.group], name, option, hidden=name in hidden)


def add_option(section: Section, name: str, option: Option, *, hidden: bool = False) -> None:
    """Add an option by the name of its field."""
    values: dict[str, Any] = {"choices": option.choices}
    if option.kind == "switch":
        values = {"action": "store_const", "const": True}
    elif option.kind != "text":
        values = {
            "type": partial(_parsed, option),
            "metavar": option.metavar or _METAVARS[option.kind],
        }
    elif option.choices is None:
        values = {"metavar": option.metavar}
    elif isinstance(next(iter(option.choices)), int):
        values["type"] = int
    help_text = argparse.SUPPRESS if hidden else option.help
    section.add_argument(*option.flags, dest=name, help=help_text, **values)


def _parsed(option: Option, text: str) -> Any:
    """The value that `text` stands for, if the option allows it."""
    value: Any
    try:
        if option.kind == "names":
            value = list(dict.fromkeys(text.split(",")))
        elif option.kind == "count":
            value = int(text)
        else:  # a loss may be percent: 1% or 0.01
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from e
    if (expected := option.expected(value)) is not None:
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
    return value


def request_of(args: argparse.Namespace, request: type[Request]) -> Request:
    """Make a request from the options of `add_options`; what it refuses is wrong usage."""
    try:
        return request(**given(args, *options_of(request)))
    except GacError as e:
        args.usage_error(str(e))
        raise  # usage_error has ended the process


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of those options among `names` that were given."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def add_device(parser: Section) -> None:
    """Add --device and --quiet."""
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda or cuda:N; default: cuda if there is a GPU, else cpu",
    )
    add_quiet(parser)


def device_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of `add_device` that were given."""
    return given(args, "device") | {"progress": shows_progress(args)}


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
