"""``--storage``: from the command line or the environment, and a password in it out of sight."""

from __future__ import annotations

import os
import sys

VARIABLE = "TITAN_TUNE_STORAGE"
"""``study.storage.STORAGE_VARIABLE``; importing that module takes a second."""


def concealed(url: str | None) -> str | None:
    """The storage, no longer in the environment that probes inherit.

    Where this process's own command line shows a password, the process starts itself again without it: everybody on the
    machine can read the list of processes, only the user its environment.
    """
    os.environ.pop(VARIABLE, None)
    if not url or "://" not in url:
        return url or None
    from titan_tune.study.storage import passwords

    shown = sys.orig_argv
    command = without_storage(shown, url)
    if command != shown and passwords(url):
        os.execve(sys.executable, [sys.executable, *command[1:]], {**os.environ, VARIABLE: url})
    return url


def without_storage(arguments: list[str], url: str) -> list[str]:
    """The command line without ``--storage url``."""
    kept: list[str] = []
    for argument in arguments:
        if argument == url and kept and kept[-1] == "--storage":
            kept.pop()
        elif argument != f"--storage={url}":
            kept.append(argument)
    return kept
