"""What a search shows of itself while it runs, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from titan_tune.domain.probe import ProbeProgress
from titan_tune.study.budget import Spent
from titan_tune.study.plan import Plan
from titan_tune.study.records import Role, TrialRecord


@dataclass(frozen=True)
class Running:
    """One probe in flight, for display."""

    label: str
    role: Role
    progress: ProbeProgress


@dataclass(frozen=True)
class Snapshot:
    """The state of a search at one moment."""

    plan: Plan
    stage: str
    running: tuple[Running, ...]
    records: tuple[TrialRecord, ...]
    spent: Spent
    elsewhere: int = 0
    """Probes that other searches of the same study have in flight."""


class View(Protocol):
    """Whatever shows a search to a person."""

    def update(self, snapshot: Snapshot) -> None:
        """Draw the state; called a few times a second."""
        ...

    def finished(self, record: TrialRecord, label: str) -> None:
        """A probe ended, of this search or of another one of the study."""
        ...

    def note(self, text: str) -> None:
        """One line that should stay visible."""
        ...
