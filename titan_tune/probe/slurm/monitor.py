"""Slurm's commands away from the search's own thread: a controller that is down makes each of them take seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from titan_tune.probe.slurm.jobs import JobRow, Listing

THREADS: Final = 8

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Seen:
    """What the controller last said of one job; ``at`` is the monotonic time at which it was asked."""

    __slots__ = ("at", "reachable", "row")

    def __init__(self, row: JobRow | None, *, reachable: bool, at: float) -> None:
        self.row, self.reachable, self.at = row, reachable, at


class Monitor:
    """Lists all watched jobs in one call, at most every ``interval`` seconds; runs other calls on the side.

    Its methods return at once and belong to one thread.
    """

    def __init__(self, listing: Callable[[tuple[str, ...]], Listing], *, interval: float) -> None:
        self._listing, self._interval = listing, interval
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="slurm")
        self._watched: set[str] = set()
        self._asked: tuple[str, ...] = ()
        self._begun = 0.0
        self._pending: Future[Listing] | None = None
        self._asked_at = float("-inf")
        self._seen: dict[str, Seen] = {}

    def watch(self, job_id: str) -> None:
        """Include a job from the next listing on."""
        self._watched.add(job_id)
        self._asked_at = float("-inf")

    def forget(self, job_id: str) -> None:
        """Leave a job out from now on."""
        self._watched.discard(job_id)
        self._seen.pop(job_id, None)

    def seen(self, job_id: str) -> Seen | None:
        """What is known of a watched job; ``None`` before the first listing that asked for it."""
        self._refresh()
        return self._seen.get(job_id)

    def call(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Run a call on the side."""
        return self._pool.submit(function, *args, **kwargs)

    def close(self) -> None:
        """Wait for the calls that have begun, drop the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._pending is not None and self._pending.done():
            answer, self._pending = self._pending.result(), None
            for job_id in self._asked:
                if job_id in self._watched:
                    row = answer.jobs.get(job_id)
                    self._seen[job_id] = Seen(row, reachable=answer.reachable, at=self._begun)
        if self._pending is None and self._watched and now - self._asked_at >= self._interval:
            self._asked, self._asked_at, self._begun = tuple(sorted(self._watched)), now, now
            self._pending = self._pool.submit(self._listing, self._asked)
