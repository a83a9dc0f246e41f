"""How much of a file with records is text: a file that is hardly any is refused.

How many tokens are wanted does not bound what blank lines, empty texts and other values cost, and
ten kilobytes of a .gz file may be ten million blank lines. So text pays for them: what is read may
exceed it by a factor, beyond a first part of the file. Nor may a small file be much text, which
can only be the same text again and again.
"""

from pathlib import Path

from vllm_gac.errors import CheckpointError

# Bytes for each character of text, and those that are free. To parse so many takes about as long as
# to tokenize a character.
_FOR_A_CHARACTER, _FREE = 64, 1 << 24
# Bytes of records for each byte of the file. Text that people wrote is packed to a tenth or so.
_UNPACKED = 256
# What a record costs beside its own bytes, though it be a blank line.
_A_RECORD = 256


class TextShare:
    """What was read of a file, and how much text was found in it."""

    def __init__(self, path: Path) -> None:
        self._path, self._records, self._bytes, self._characters = path, 0, 0, 0
        # What is no file is refused when it is opened.
        self._most = _FREE + _UNPACKED * (path.stat().st_size if path.is_file() else 0)

    def read(self, size: int) -> None:
        """Count a record of `size` bytes. Raises CheckpointError if there is hardly any text."""
        self._records += 1
        self._bytes += size
        if self._bytes > self._most:
            raise CheckpointError(
                f"{self._path}: unpacks to more than {self._most} bytes, {_UNPACKED} times its own "
                "size; such a file repeats itself: leave out what it repeats"
            )
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
