"""Consoles for people: as wide as the terminal, and plain text without padding in a pipe."""

import os
import sys
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rich.console import Console

#: columns when nobody watches and COLUMNS says nothing
PROSE_WIDTH = 100
TABLE_WIDTH = 180


class _Trimmed:
    """A text stream without blanks at line ends: rich pads every cell to its column."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._blanks = ""

    @property
    def _stream(self) -> IO[str]:
        # looked up at each write, as print() does: callers may replace sys.stdout
        return cast(IO[str], getattr(sys, self._name))

    def write(self, text: str) -> int:
        """Hold blanks back until something other than a line end follows."""
        *lines, last = (self._blanks + text).split("\n")
        kept = last.rstrip(" ")
        self._blanks = last[len(kept) :]
        self._stream.write("".join(line.rstrip(" ") + "\n" for line in lines) + kept)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Never: this stands for a pipe or a file."""
        return False


def console(*, stderr: bool = False, width: int = TABLE_WIDTH, markup: bool = True) -> "Console":
    """A console on stdout or stderr; ``width`` columns where it is no terminal."""
    # here, because many commands answer without it
    from rich.console import Console

    watched = Console(stderr=stderr, highlight=False, markup=markup)
    if watched.is_terminal:
        return watched
    columns = os.environ.get("COLUMNS", "")
    return Console(
        file=cast(IO[str], _Trimmed("stderr" if stderr else "stdout")),
        highlight=False,
        markup=markup,
        width=int(columns) if columns.isdigit() and int(columns) >= 40 else width,
    )
