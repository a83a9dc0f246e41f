"""How much of a file with records is text: a file that is hardly any is refused.

How many tokens are wanted does not bound what blank lines, empty texts and other values cost, and
ten kilobytes of a .gz file may be ten million blank lines. So text pays for them: what is read may
exceed it by a factor, beyond a first part of the file.
"""

from pathlib import Path

from vllm_gac.errors import CheckpointError

# Bytes for each character of text, and those that are free. To parse so many takes about as long as
# to tokenize a character.
_FOR_A_CHARACTER, _FREE = 64, 1 << 24
# What a record costs beside its own bytes, though it be a blank line.
_A_RECORD = 256


class TextShare:
    """What was read of a file, and how much text was found in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._records, self._bytes, self._characters = path, 0, 0, 0

    def read(self, size: int) -> None:
        """Count a record of `size` bytes. Raises CheckpointError if there is hardly any text."""
        self._records += 1
        self._bytes += size
        cost = self._bytes + _A_RECORD * self._records
        if cost > _FREE + _FOR_A_CHARACTER * self._characters:
            raise CheckpointError(
                f"{self._path}: hardly any text: {self._characters} characters in the first "
                f"{self._records} records, blank ones included, of {self._bytes} bytes; give a "
                "file of text, or leave out what is beside it"
            )

    def found(self, characters: int) -> None:
        """Count the text of the last record."""
        self._characters += characters
