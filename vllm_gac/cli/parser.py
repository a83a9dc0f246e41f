"""The parser of the command line. An error is one line, and a second line names the help."""

import argparse
from typing import NoReturn

from vllm_gac.errors.shown import sentence


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors omit the usage, which fills a screen for most verbs."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {sentence(message)}\nSee '{self.prog} --help'.\n")
