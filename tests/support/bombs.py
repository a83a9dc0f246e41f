"""What leaves a marker where it is unpickled."""

from pathlib import Path
from typing import Any


class Bomb:
    """Leaves a marker file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)
