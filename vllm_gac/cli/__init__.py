"""`vllm-gac VERB`: parse arguments, call the module that does the work, print what it returns.

Results go to stdout, with --json as one line of JSON; progress and errors go to stderr. Exit
status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Every verb imports what it needs when it
runs, so that those which only read headers or integers start without torch.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from vllm_gac.cli import (
    align,
    calibrate,
    compress,
    evaluate,
    import_model,
    inspect,
    plan,
    profile,
    repair,
    solve,
    verify,
)
from vllm_gac.cli.output import logged_to_stderr
from vllm_gac.cli.parser import Parser
from vllm_gac.errors import GacError
from vllm_gac.errors.shown import sentence
from vllm_gac.layout.names import VERSION

_EXAMPLE = """\
  vllm-gac compress MODEL --out DIR --param-ratio 0.85 --kv-ratio 0.75 --calibration TEXT
  vllm-gac inspect DIR
  vllm serve DIR --load-format gac"""
_VERBS = (
    compress,
    import_model,
    inspect,
    verify,
    evaluate,
    calibrate,
    plan,
    profile,
    align,
    repair,
    solve,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be anything
    if sys.stderr is None or not sys.stderr.isatty():
        # In a log file a progress bar is a line every half minute, not ten a second.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # said here by the verb's parser, whose help lists what there is
        args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with logged_to_stderr(warnings_only=getattr(args, "quiet", False)):
            status = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # a full disk shows here, not at exit
        return status
    except GacError as e:
        return _failed(str(e))
    except BrokenPipeError:
        _abandon_stdout()  # whoever read our output, e.g. `head`, has seen enough
        return 1
    except OSError as e:
        if e.filename is None:
            _abandon_stdout()  # it may be what failed
        return _failed(f"{e.filename}: {e.strerror}" if e.filename else e.strerror or str(e))
    except ModuleNotFoundError as e:
        if e.name not in ("torch", "tokenizers", "vllm", "openai", "PIL"):
            raise
        return _failed(
            f"'{args.verb}' needs {e.name}, which is not installed: "
            "install vllm-gac with its extra 'serve' for CUDA, or 'cpu'"
        )
    except RuntimeError as e:
        if type(e).__name__ != "OutOfMemoryError":  # torch's, which need not be installed
            raise
        return _failed(
            f"the GPU's memory is full ({str(e).partition('. ')[0]}); "
            "free some of it, give --device cpu, or fewer or shorter sequences"
        )
    except KeyboardInterrupt:
        print(f"vllm-gac: interrupted{args.hint}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="vllm-gac",
        description="Compress LLMs to dimensions GPUs like, and serve them with vLLM.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-gac {VERSION}")
    parser.set_defaults(hint="")  # a verb says here how to go on after an interrupt
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    for parser_of_verb in verbs.choices.values():
        parser_of_verb.set_defaults(usage_error=parser_of_verb.error)
    return parser


def _abandon_stdout() -> None:
    """Let the interpreter's flush at exit, which would fail as ours did, go nowhere."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(message: str) -> int:
    print(f"vllm-gac: error: {sentence(message)}", file=sys.stderr)
    return 1
