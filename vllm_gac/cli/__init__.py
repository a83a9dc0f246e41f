"""`vllm-gac VERB`: parse the arguments, call the module that does the work, print its result.

Results go to stdout, as one line of JSON with --json. Progress and errors go to stderr. The exit
status is 0 for success, 1 for failure, 2 for wrong usage and 130 for an interrupt. Each verb
imports its modules when it runs, so verbs that only read headers or integers start without torch.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

try:
    from vllm_gac.cli import (
        calibrate,
        compress,
        evaluate,
        export,
        generate,
        heal,
        import_model,
        inspect,
        plan,
        profile,
        repair,
    )
    from vllm_gac.cli.output import logged_to_stderr
    from vllm_gac.errors import GacError
    from vllm_gac.errors.sanitize import sentence
    from vllm_gac.version import version
except KeyboardInterrupt:  # loading takes a while
    print("vllm-gac: interrupted", file=sys.stderr)
    sys.exit(130)

_EXAMPLE = """\
  vllm-gac compress MODEL --out DIR --param-ratio 0.85 --kv-ratio 0.75 --calibration TEXT
  vllm-gac inspect DIR
  vllm serve DIR --load-format gac"""
_VERBS = (
    compress,
    import_model,
    inspect,
    evaluate,
    generate,
    calibrate,
    plan,
    profile,
    repair,
    heal,
    export,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: The arguments. By default, those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may hold any bytes
    known = parser()
    args, unknown = known.parse_known_args(argv)
    if unknown:  # the verb's parser reports this, because its help lists the verb's options
        args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with logged_to_stderr(warnings_only=getattr(args, "quiet", False)):
            status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # so that an error such as a full disk is raised here, not at exit
        return status
    except GacError as e:
        return _failed(str(e))
    except BrokenPipeError:
        _abandon_stdout()  # the reader of our output, such as `head`, has closed it
        return 1
    except OSError as e:
        if e.filename is None:
            _abandon_stdout()  # stdout itself may have failed
        return _failed(f"{e.filename}: {e.strerror}" if e.filename else e.strerror or str(e))
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "tokenizers", "vllm"):
            raise
        return _failed(
            f"'{args.verb}' needs {e.name}, which is not installed: "
            "install vllm-gac with its extra 'serve' for CUDA, or 'cpu'"
        )
    except RuntimeError as e:
        if type(e).__name__ != "OutOfMemoryError":  # torch's class; torch may not be installed
            raise
        return _failed(
            f"the GPU's memory is full ({str(e).partition('. ')[0]}); "
            "free some of it, give --device cpu, or fewer or shorter sequences"
        )
    except KeyboardInterrupt:
        print(f"vllm-gac: interrupted{args.hint}", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    main = Parser(
        prog="vllm-gac",
        description="Compress LLMs to dimensions GPUs like, and serve them with vLLM.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version")
    main.set_defaults(hint="")  # verbs say here how to continue after an interrupt
    verbs = main.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    for parser_of_verb in verbs.choices.values():
        parser_of_verb.set_defaults(usage_error=parser_of_verb.error)
    return main


class _ShowVersion(argparse.Action):
    """Print the version and exit: only then is git asked for the commit of a checkout."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"vllm-gac {version()}")
        parser.exit()


def _abandon_stdout() -> None:
    """Redirect stdout to nowhere. Otherwise the interpreter's flush at exit fails as ours did."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str) -> int:
    print(f"vllm-gac: error: {sentence(message)}", file=sys.stderr)
    return 1


class _Once(argparse.Action):
    """Store a value, which argparse would replace by a later one in silence."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None:
            given: set[str] = vars(namespace).setdefault("given_once", set())
            if self.dest in given:
                parser.error(f"{option_string}: is given twice; give it once, with all its values")
            given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes each option once.

    Its errors omit the usage, which fills a screen for most verbs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {sentence(message)}\nSee '{self.prog} --help'.\n")
