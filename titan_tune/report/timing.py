"""Where the probes' wall time went, by phase. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from titan_tune.study.records import TrialRecord

PHASES: Final = (
    ("launch", "until the processes exist"),
    ("imports", "imports"),
    ("init", "process groups and model"),
    ("first_step", "first step"),
    ("steps", "all other steps"),
    ("shutdown", "shutdown"),
)
"""``details["phases"]`` of an outcome, and what it is called."""
COMPILE: Final = ("compile", "compilation, within the first step")
REST: Final = "probes that never trained, and attempts that were tried again"


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase, over all probes."""

    name: str
    seconds: float
    """Of all probes together."""
    share: float
    """Of all probes' wall time."""
    typical: float | None
    """Median seconds of a probe; ``None`` for what is no phase of a probe."""


def where_time_went(records: Sequence[TrialRecord]) -> tuple[PhaseTime, ...]:
    """The phases in order, compilation after the first step that it is part of, then what no phase accounts for.

    Empty where no probe recorded phases (other runners, earlier versions).
    """
    total = sum(record.outcome.seconds for record in records)
    timed = [phases for record in records if (phases := record.outcome.details.get("phases"))]
    if not timed or total <= 0:
        return ()
    rows = []
    for name, title in PHASES:
        rows.append(_phase(title, [phases[name] for phases in timed if name in phases], total))
        if name == "first_step" and (
            compiled := [phases[COMPILE[0]] for phases in timed if phases.get(COMPILE[0])]
        ):
            rows.append(_phase(COMPILE[1], compiled, total))
    known = sum(phases.get(name, 0.0) for phases in timed for name, _ in PHASES)
    rest = total - known
    return (*rows, *([PhaseTime(REST, rest, rest / total, None)] if rest > 0.01 * total else []))


def _phase(title: str, seconds: Sequence[float], total: float) -> PhaseTime:
    return PhaseTime(title, sum(seconds), sum(seconds) / total, median(seconds) if seconds else None)
