"""Files that commands write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from titan_tune.errors import InputError
from titan_tune.probe.record import write_whole

HEAD_CHARACTERS = 2000
"""What of an existing file is its head."""


def write_result(
    path: Path, text: str, *, is_own: Callable[[str], bool], option: str, force: bool, mode: int = 0o644
) -> None:
    """Write a result whole; a file in its place is only replaced when ``is_own`` says so of its head, or by ``force``.

    Raises:
        InputError: somebody else's file, a folder or a device in the way.
    """
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise InputError(f"{option}: {path} is not an ordinary file")
    if path.exists() and not force:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD_CHARACTERS)
        if not is_own(head):
            raise InputError(
                f"{option}: {path} exists and was not written by titan-tune; --force replaces it"
            )
    write_whole(path, text)
    path.chmod(mode)
