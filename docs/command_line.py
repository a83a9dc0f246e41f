"""The page of the command line: what `vllm-gac --help` and `vllm-gac VERB --help` print."""

import contextlib
import io
import os
import re
from unittest.mock import patch

from vllm_gac.cli import main


def command_line_page() -> str:
    """The page, as Markdown."""
    # argparse wraps lines for a terminal of so many columns, whatever the real one has.
    with patch.dict(os.environ, COLUMNS="100"):
        top = _help()
        verbs = re.findall(r"^ {4}(\w+)", top.partition("verbs:")[2], re.MULTILINE)
        pages = {"vllm-gac": top} | {f"vllm-gac {verb}": _help(verb) for verb in verbs}
    parts = ["# Command line", "What `vllm-gac --help` and `vllm-gac VERB --help` print."]
    parts += [f"## {title}\n\n```text\n{text.rstrip()}\n```" for title, text in pages.items()]
    return "\n\n".join(parts) + "\n"


def _help(*verb: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    return printed.getvalue()
