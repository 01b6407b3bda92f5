"""What a study remembers of each probe, as plain data read back from Optuna's trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeStatus
from titan_tune.probe.record import outcome_from_dict
from titan_tune.study.lease import Lease


class Role(StrEnum):
    """Why a probe ran."""

    BASELINE = "baseline"
    PROBE = "probe"
    FINALIST = "finalist"


class Attr:
    """Names of the user attributes of trials and studies."""

    CONFIG_ID = "config_id"
    ROLE = "role"
    DIRECTORY = "directory"
    OUTCOME = "outcome"
    VALUES = "values"
    PREDICTED = "predicted"
    CUT_BY_BUDGET = "cut_by_budget"
    """Whether the probe's timeout was what was left of the budget: a timeout is then nobody's fault."""
    LEASE = "lease"
    """Which search runs the trial (``titan_tune.study.lease``)."""
    WITHDRAWN = "withdrawn"
    """The trial was taken back before its probe started: another search was first, or the budget was used up."""
    ADOPTS = "adopts"
    """Number of a trial that was given up for lost; this one holds the outcome that it had after all."""
    STUDY = "titan_tune"


@dataclass(frozen=True)
class TrialRecord:
    """One finished probe."""

    number: int
    config_id: str
    role: Role
    choices: Mapping[str, str]
    values: Mapping[str, Any]
    directory: Path
    outcome: ProbeOutcome
    predicted: Mapping[str, float]
    adopts: int | None = None
    """Number of the trial whose outcome this is, where that one had been given up for lost."""

    @property
    def measurement(self) -> Measurement | None:
        """What was measured, for a completed probe."""
        return self.outcome.measurement if self.outcome.status is ProbeStatus.COMPLETED else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median tokens/s per GPU of a completed probe."""
        return self.measurement.tokens_per_second_per_gpu if self.measurement else None


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """The record of a finished trial; ``None`` for one whose probe never started."""
    attrs = trial.user_attrs
    if trial.state not in (TrialState.COMPLETE, TrialState.FAIL) or Attr.CONFIG_ID not in attrs:
        return None
    outcome = _lost(attrs) if is_lost(trial) else _told(attrs)
    if outcome is None:
        return None
    return TrialRecord(
        number=trial.number,
        config_id=attrs[Attr.CONFIG_ID],
        role=Role(attrs.get(Attr.ROLE, Role.PROBE)),
        choices=dict(trial.params),
        values=attrs.get(Attr.VALUES, {}),
        directory=Path(attrs[Attr.DIRECTORY]),
        outcome=outcome,
        predicted=attrs.get(Attr.PREDICTED, {}),
        adopts=attrs.get(Attr.ADOPTS),
    )


def is_lost(trial: FrozenTrial) -> bool:
    """Whether another search ended the trial because the one that ran it seemed to be gone.

    Such a trial failed without an outcome, or with the outcome of a completed probe: its own search came too late.
    """
    attrs = trial.user_attrs
    if trial.state is not TrialState.FAIL or Attr.LEASE not in attrs or Attr.WITHDRAWN in attrs:
        return False
    outcome = _told(attrs)
    return outcome is None or outcome.status is ProbeStatus.COMPLETED


def _told(attrs: Mapping[str, Any]) -> ProbeOutcome | None:
    return outcome_from_dict(attrs[Attr.OUTCOME]) if Attr.OUTCOME in attrs else None


def _lost(attrs: Mapping[str, Any]) -> ProbeOutcome:
    lease = Lease.from_dict(attrs[Attr.LEASE])
    return ProbeOutcome(
        ProbeStatus.CANCELLED, "the search that ran it ended", lease.seconds if lease else 0.0
    )


def collect(found: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Every probe once, oldest first: an outcome that was found later stands for the trial that was given up."""
    records = sorted(found, key=lambda record: record.number)
    heirs: dict[int, int] = {}
    for record in records:
        if record.adopts is not None:
            heirs.setdefault(record.adopts, record.number)
    return tuple(
        record
        for record in records
        if record.number not in heirs and (record.adopts is None or heirs[record.adopts] == record.number)
    )


def records_of(study: optuna.Study) -> tuple[TrialRecord, ...]:
    """Every finished probe of a study, oldest first."""
    trials = study.get_trials(deepcopy=False)
    return collect(record for record in map(record_of, trials) if record is not None)


def completed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The probes that measured a throughput."""
    return [r for r in records if r.measurement is not None]
