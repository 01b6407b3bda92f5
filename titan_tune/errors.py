"""The exception tree. Each class carries the exit code the command line ends with.

Bad input never shows a traceback: its message is one line that names the file, the key,
the value and the valid choices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TitanTuneError(Exception):
    """Base of all errors that titan-tune raises on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(TitanTuneError):
    """A file, flag, key or value that cannot be used as given."""

    exit_code = 2


class StorageError(TitanTuneError):
    """The study storage cannot be opened, read or written."""

    exit_code = 2


class NothingFeasibleError(TitanTuneError):
    """Every candidate is invalid or does not fit; the message says what binds."""

    exit_code = 3


class ProbesFailedError(TitanTuneError):
    """No probe could be run (launcher, machine or disk), whatever the configuration."""

    exit_code = 4


class InterruptedSearchError(TitanTuneError):
    """The user stopped the search; everything measured so far is saved."""

    exit_code = 130


def did_you_mean(word: str, choices: Iterable[str], *, limit: int = 3) -> str:
    """``' (did you mean a, b?)'`` for the choices nearest to ``word``, or ``''``."""
    near = difflib.get_close_matches(word, list(choices), n=limit, cutoff=0.6)
    return f" (did you mean {', '.join(near)}?)" if near else ""
