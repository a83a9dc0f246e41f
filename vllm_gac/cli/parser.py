"""The command line's parser: a mistake is one line, and a second one names the help to read."""

import argparse
from typing import NoReturn

from vllm_gac.errors.shown import sentence


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors do not print the usage, which is a screen for most verbs."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {sentence(message)}\nSee '{self.prog} --help'.\n")
