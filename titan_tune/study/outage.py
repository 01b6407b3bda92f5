"""A storage that does not answer: how long to wait, when to try again, when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from titan_tune.errors import StorageError

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0


@dataclass(slots=True)
class Outage:
    """The state of the storage as the search has seen it. Times are of one clock, in seconds."""

    patience: float
    """How long a storage may be away before a search that has nothing else to do gives up."""
    error: StorageError | None = None
    since: float = 0.0
    retry_at: float = 0.0
    _delay: float = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the last use of the storage failed."""
        return self.error is not None

    def may_try(self, now: float) -> bool:
        """Whether the storage should be used now."""
        return self.error is None or now >= self.retry_at

    def failed(self, error: StorageError, now: float) -> None:
        """The storage was used and failed: wait twice as long as the last time."""
        if self.error is None:
            self.since, self._delay = now, 0.0
        self.error = error
        self._delay = min(LONGEST_DELAY_SECONDS, max(FIRST_DELAY_SECONDS, 2 * self._delay))
        self.retry_at = now + self._delay

    def worked(self) -> None:
        """The storage was used and answered."""
        self.error = None

    def is_too_long(self, now: float) -> bool:
        """Whether it was away for longer than the search waits."""
        return self.error is not None and now - self.since >= self.patience
