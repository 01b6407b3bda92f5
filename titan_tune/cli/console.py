"""Consoles: results on stdout, everything else on stderr."""

from __future__ import annotations

import os

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: wide enough that tables do not fold."""


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
