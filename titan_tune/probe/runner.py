"""The seam between the study and whatever runs a probe."""

from __future__ import annotations

from typing import Protocol

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSpec


class ProbeHandle(Protocol):
    """One probe in flight."""

    def poll(self) -> ProbeOutcome | None:
        """The outcome once every process of the probe has ended, else ``None``; never blocks long."""
        ...

    def progress(self) -> ProbeProgress:
        """What the probe is doing, for display."""
        ...

    def cancel(self) -> ProbeOutcome:
        """Stop every process, wait until they are gone, and return the outcome."""
        ...


class Runner(Protocol):
    """Starts probes. ``close`` cancels what is still running; use it as a context manager's end."""

    name: str
    slots: int

    def start(self, spec: ProbeSpec) -> ProbeHandle:
        """Launch the probe and return at once."""
        ...

    def close(self) -> None:
        """Cancel and reap everything started here."""
        ...
