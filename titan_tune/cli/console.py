"""Consoles: results on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

import rich.console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: wide enough that tables do not fold."""


class Console(rich.console.Console):
    """Leaves a closed pipe to ``cli.run``; rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> NoReturn:
        """The reader of the output went away."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _width() -> int | None:
    return int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else None


def stdout_console() -> Console:
    """For results."""
    console = Console(width=_width())
    return console if console.is_terminal else Console(width=_width() or PLAIN_WIDTH)


def stderr_console() -> Console:
    """For progress and notes."""
    console = Console(stderr=True, width=_width())
    return console if console.is_terminal else Console(stderr=True, width=_width() or PLAIN_WIDTH)
