"""A runner that launches nothing: it answers from known outcomes. For tests and for comparing samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSpec, ProbeStatus
from titan_tune.probe.record import write_outcome


@dataclass
class ReplayHandle:
    """A probe whose outcome is known from the start; ``polls`` polls pass before it is told."""

    spec: ProbeSpec
    outcome: ProbeOutcome
    polls: int

    def poll(self) -> ProbeOutcome | None:
        """Count down, then answer."""
        if self.polls > 0:
            self.polls -= 1
            return None
        write_outcome(self.spec.directory, self.outcome)
        return self.outcome

    def progress(self) -> ProbeProgress:
        """Says that it is a replay."""
        return ProbeProgress("replay", 0, self.spec.settings.steps, None, 0.0)

    def cancel(self) -> ProbeOutcome:
        """Nothing runs, so nothing is stopped."""
        return ProbeOutcome(ProbeStatus.CANCELLED, "replay cancelled", 0.0)


class ReplayRunner:
    """Answers every probe with ``outcome_of(spec)``; ``started`` lists what was asked, in order."""

    name = "replay"

    def __init__(
        self, outcome_of: Callable[[ProbeSpec], ProbeOutcome], *, slots: int = 1, polls: int = 0
    ) -> None:
        self.slots = slots
        self.started: list[ProbeSpec] = []
        self._outcome_of, self._polls = outcome_of, polls

    def start(self, spec: ProbeSpec) -> ReplayHandle:
        """Look the outcome up."""
        self.started.append(spec)
        return ReplayHandle(spec, self._outcome_of(spec), self._polls)

    def close(self) -> None:
        """Nothing to stop."""
