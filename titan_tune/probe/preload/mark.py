"""A forked process under a name of its own in ``/proc/PID/environ``.

The search finds what is left of a probe by the mark in its processes' environment. The kernel shows the
memory in which a program's first environment lies, and a fork has its parent's: so the mark is written there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

VARIABLE: Final = "TITAN_TUNE_PROBE_ID"
"""The plug-in's ``PROBE_ID``, which cannot be imported before a rank does."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the mark's value lies in this process and its forks."""

    address: int
    length: int

    @classmethod
    def find(cls) -> Mark | None:
        """The place; ``None`` where the variable is not set. Call it before anything changes the environment."""
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(VARIABLE.encode())
        return cls(address, len(ctypes.string_at(address))) if address else None

    def write(self, value: str) -> None:
        """Put ``value`` there. Raises ValueError where it does not fit exactly."""
        text = value.encode()
        if len(text) != self.length:
            raise ValueError(f"a mark of {len(text)} bytes where {self.length} are")
        ctypes.memmove(self.address, text, self.length)
