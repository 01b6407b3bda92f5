"""A study in one log file, for file systems that many hosts share and that lock badly (NFS).

Optuna's journal appends a line an operation. A writer that is killed in mid-write, or a disk that fills up, leaves
half a line; the next writer's line would join it, and from then on the study could not be opened. So whoever takes
the journal's lock first cuts the file back to its last newline. Readers take no lock: they ignore half a last line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

TORN_SUFFIX: Final = ".torn"
"""Beside the journal: what was cut off, in case somebody wants to see it."""
LOCK_GRACE_SECONDS: Final = 30
"""A lock file that stays this long was left by a writer that is gone; an append takes milliseconds."""
_BLOCK: Final = 1 << 16


class MendingLock(JournalFileOpenLock):
    """The lock of NFSv3 and later, which mends the journal as soon as it is held.

    Not the symlink lock, which looks at the time of the journal and not of the lock: of two that wait for a stale
    one, the second would break the first one's new lock.
    """

    def __init__(self, path: Path) -> None:
        """``path`` of the journal, absolute; ``mended`` counts the bytes that were cut off so far."""
        super().__init__(str(path), grace_period=LOCK_GRACE_SECONDS)
        self._path = path
        self.mended = 0

    def acquire(self) -> bool:
        """Wait for the lock, then mend."""
        held = super().acquire()
        try:
            self.mended += mend(self._path)
        except BaseException:
            self.release()
            raise
        return held


def open_journal(path: Path) -> tuple[JournalFileBackend, int]:
    """The journal at ``path``, made where there is none, and how many bytes of a torn line were cut off."""
    lock = MendingLock(path)
    backend = JournalFileBackend(str(path), lock)
    lock.acquire()
    lock.release()
    return backend, lock.mended


def mend(path: Path) -> int:
    """Cut ``path`` back to its last newline, keep what was cut beside it, return the number of bytes.

    The caller holds the journal's lock.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_lines(file, size)
        if end == size:
            return 0
        file.seek(end)
        torn = file.read()
        with path.with_name(path.name + TORN_SUFFIX).open("ab") as aside:
            aside.write(torn + b"\n")
        file.truncate(end)
        os.fsync(file.fileno())
        return len(torn)


def _end_of_lines(file: BinaryIO, size: int) -> int:
    """Offset behind the last newline; 0 when there is none."""
    position = size
    while position > 0:
        start = max(0, position - _BLOCK)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0
