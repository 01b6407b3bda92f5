"""What a study remembers of each probe, as plain data read back from Optuna's trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeStatus
from titan_tune.probe.record import outcome_from_dict


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

    @property
    def measurement(self) -> Measurement | None:
        """What was measured, for a completed probe."""
        return self.outcome.measurement if self.outcome.status is ProbeStatus.COMPLETED else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median tokens/s per GPU of a completed probe."""
        return self.measurement.tokens_per_second_per_gpu if self.measurement else None


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """The record of a finished trial; ``None`` for a trial without an outcome (never started, or lost)."""
    attrs = trial.user_attrs
    if trial.state not in (TrialState.COMPLETE, TrialState.FAIL) or Attr.OUTCOME not in attrs:
        return None
    return TrialRecord(
        number=trial.number,
        config_id=attrs[Attr.CONFIG_ID],
        role=Role(attrs.get(Attr.ROLE, Role.PROBE)),
        choices=dict(trial.params),
        values=attrs.get(Attr.VALUES, {}),
        directory=Path(attrs[Attr.DIRECTORY]),
        outcome=outcome_from_dict(attrs[Attr.OUTCOME]),
        predicted=attrs.get(Attr.PREDICTED, {}),
    )


def records_of(study: optuna.Study) -> tuple[TrialRecord, ...]:
    """Every finished probe of a study, oldest first."""
    trials = study.get_trials(deepcopy=False)
    return tuple(record for record in map(record_of, trials) if record is not None)


def completed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The probes that measured a throughput."""
    return [r for r in records if r.measurement is not None]
