"""The trend checks of a study as a report shows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_tune.study.info import StudyInfo
from titan_tune.study.records import TrialRecord
from titan_tune.study.selection import Winner
from titan_tune.study.trend import Check, problems, standing_checks, study_checks


@dataclass(frozen=True, slots=True)
class TrendRow:
    """One measured probe: check → its grade, for the checks that concern it."""

    number: int
    grades: Mapping[str, str]
    label: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrendTable:
    """Every check of every measured probe."""

    checks: tuple[str, ...] = ()
    """Names, in the order of the first probe that has them."""
    rows: tuple[TrendRow, ...] = ()
    best: tuple[Check, ...] = ()
    """Of the best configuration, with what was found."""

    @property
    def best_problems(self) -> tuple[str, ...]:
        """What the best configuration should not be trained with unseen."""
        return problems(self.best)


def trend_table(
    info: StudyInfo, records: Sequence[TrialRecord], best: Winner | None, labels: Mapping[str, str]
) -> TrendTable:
    """The table of a study; ``labels`` say what each config id is called."""
    checks = study_checks(info, records)
    names = dict.fromkeys(check.name for found in checks.values() for check in found)
    rows = tuple(
        TrendRow(
            record.number,
            {check.name: str(check.grade) for check in checks[record.number]},
            labels[record.config_id],
            problems(checks[record.number]),
        )
        for record in records
        if checks.get(record.number)
    )
    return TrendTable(tuple(names), rows, standing_checks(best.standing, checks) if best else ())
