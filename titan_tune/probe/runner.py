"""The seam between the study and whatever runs a probe."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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


@runtime_checkable
class DetachableRunner(Runner, Protocol):
    """A runner whose probes outlive the search: jobs of a scheduler. They run on nodes of their own, so probes in
    flight at the same time do not disturb each other."""

    def attach(self, spec: ProbeSpec) -> ProbeHandle | None:
        """The probe of ``spec.directory`` that an earlier search started, or ``None`` when there is no such job.

        Nothing is submitted. A job that has ended meanwhile counts as found: its handle gives the outcome.
        """
        ...

    def detach(self) -> None:
        """Forget every probe started or attached here and leave it running; a later ``close`` cancels nothing."""
        ...
