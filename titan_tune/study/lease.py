"""Who is running a trial, and whether that search still lives (docs/decisions/0007-shared-studies.md).

A search that runs a trial keeps a lease on it: a user attribute that it renews. Searches on one machine know at
once whether the other lives. Of a search elsewhere there is only the lease: the search is gone once its lease has not
changed for ``LEASE_SECONDS`` of the observer's own clock, during which the observer could read the storage. No
clocks are compared, and a storage that was down for an hour makes nobody look dead.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import psutil

RENEW_SECONDS: Final = 15.0
LEASE_SECONDS: Final = 60.0
"""Four renewals: one may be late, or fail and be tried again."""
_START_TOLERANCE_SECONDS: Final = 2.0
"""psutil computes a process's start from the boot time, which a correction of the clock moves a little."""

_live_tokens: set[str] = set()
"""Searches of this process that are running."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One run of the search command."""

    token: str
    host: str
    machine: str
    """Host, boot and process namespace: where ``pid`` means something."""
    pid: int
    started: float
    """Start of the process, Unix time: process numbers are used again."""

    @classmethod
    def this_process(cls) -> Owner:
        """A new owner; it counts as alive between :meth:`enter` and :meth:`leave`."""
        pid = os.getpid()
        host = socket.gethostname()
        return cls(uuid.uuid4().hex, host, _machine(host), pid, psutil.Process(pid).create_time())

    def enter(self) -> None:
        """The search begins."""
        _live_tokens.add(self.token)

    def leave(self) -> None:
        """The search is over."""
        _live_tokens.discard(self.token)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Lease:
    """What a search says of a trial that it runs."""

    owner: Owner
    runner: str
    """Name of the runner that started the probe."""
    outlives: bool
    """Whether the probe goes on without the search: a job of a scheduler."""
    folder: str
    """Which study folder on disk holds the trial's files; searches may use different ones."""
    beat: int = 0
    """Renewals so far."""
    seconds: float = 0.0
    """How long the probe had run at the last renewal."""
    released: bool = False
    """Left running on purpose, for any search with the same runner and folder to take over."""

    def renewed(self, seconds: float) -> Lease:
        """The next lease."""
        return replace(self, beat=self.beat + 1, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Lease | None:
        """The lease of :meth:`to_dict`; ``None`` for anything else (older studies have none)."""
        try:
            return cls(**{**data, "owner": Owner(**data["owner"])})
        except (TypeError, KeyError):
            return None


class Fate(StrEnum):
    """What became of an owner, as far as this process can tell without waiting."""

    ALIVE = "alive"
    GONE = "gone"
    ELSEWHERE = "elsewhere"


def fate(owner: Owner, me: Owner) -> Fate:
    """Whether the search lives: known at once on the same machine."""
    if owner.machine != me.machine:
        return Fate.ELSEWHERE
    if owner.pid == me.pid and _same_start(owner.started, me.started):
        return Fate.ALIVE if owner.token in _live_tokens else Fate.GONE
    try:
        process = psutil.Process(owner.pid)
        running = process.status() != psutil.STATUS_ZOMBIE
        return Fate.ALIVE if running and _same_start(process.create_time(), owner.started) else Fate.GONE
    except psutil.NoSuchProcess:
        return Fate.GONE
    except psutil.Error:
        return Fate.ALIVE


def _same_start(one: float, other: float) -> bool:
    return abs(one - other) < _START_TOLERANCE_SECONDS


def _machine(host: str) -> str:
    parts = [host]
    for name, read in (
        ("/proc/sys/kernel/random/boot_id", lambda path: path.read_text().strip()),
        ("/proc/self/ns/pid", lambda path: str(path.readlink())),
    ):
        try:
            parts.append(read(Path(name)))
        except OSError:
            parts.append("")
    return " ".join(parts)


@dataclass(slots=True)
class Watch:
    """Which leases have stopped changing, by this process's own clock."""

    patience: float = LEASE_SECONDS
    _seen: dict[int, tuple[Lease, float]] = field(default_factory=dict)
    _looked: float = float("-inf")

    def expired(self, leases: Mapping[int, Lease], now: float) -> frozenset[int]:
        """The trials whose lease is the same as ``patience`` ago. Call it whenever the storage was read.

        After a gap in which nothing was read (the storage was down, this process was stopped) counting
        begins anew: the owner could not renew then, or only this process could not see it.
        """
        if now - self._looked > self.patience / 2:
            self._seen.clear()
        self._looked = now
        for number, lease in leases.items():
            if number not in self._seen or self._seen[number][0] != lease:
                self._seen[number] = (lease, now)
        for number in self._seen.keys() - leases.keys():
            del self._seen[number]
        return frozenset(n for n, (_, since) in self._seen.items() if now - since >= self.patience)
