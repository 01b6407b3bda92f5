"""One finding about a log."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_tune.titan.logs import LogLine


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """The run failed, or what it computed is worthless."""
    WARNING = "warning"
    """It runs, but not as its configuration promises."""
    NOTE = "note"
    """Worth knowing when reading its numbers."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding. ``evidence`` is the line that shows it, ``ranks`` are those concerned, where known."""

    rule: str
    severity: Severity
    message: str
    fix: str = ""
    evidence: LogLine | None = None
    ranks: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As ``diagnose --json`` prints it."""
        evidence = None
        if self.evidence is not None:
            line = self.evidence
            evidence = {"source": line.source, "line": line.number, "rank": line.rank, "text": line.text}
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "message": self.message,
            "fix": self.fix,
            "evidence": evidence,
            "ranks": list(self.ranks),
        }
