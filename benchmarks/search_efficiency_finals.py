"""The finals of a replayed search, as ``titan_tune.study.selection`` schedules and decides them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from search_efficiency_rivals import Case

from titan_tune.domain.probe import Measurement, ProbeOutcome
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import final_schedule, winner
from titan_tune.study.table import Draw, TableReplay

FINALS_SEED = 1_000_003
"""Finals answer with other draws than the search they follow."""


class Finals(NamedTuple):
    """What they cost and chose."""

    probes: int
    gpu_seconds: float
    regret: float
    """Of the winner."""


def finals(case: Case, configs: Sequence[str], draws: Sequence[Draw], seed: int) -> Finals:
    """Run them after a search that measured ``configs`` with these answers."""
    records = [
        record(number, config, Role.PROBE if number else Role.BASELINE, drawn)
        for number, (config, drawn) in enumerate(zip(configs, draws, strict=True))
    ]
    explored = len(records)
    settings = case.plan.space.probe
    replay = TableReplay(case.table, seed=FINALS_SEED + seed)
    while schedule := final_schedule(records, count=settings.finalists, repeats=settings.finalist_repeats):
        drawn = replay.draw(schedule[0])
        records.append(record(len(records), schedule[0], Role.FINALIST, drawn))
    best = winner(records)
    assert best is not None
    seconds = sum(r.outcome.seconds for r in records[explored:])
    truth = case.table.truth(best.standing.config_id) or 0.0
    return Finals(len(records) - explored, case.table.header.gpus * seconds, 1.0 - truth / case.table.optimum)


def record(number: int, config: str, role: Role, drawn: Draw) -> TrialRecord:
    """What a study would remember of a replayed probe."""
    measurement = None
    if drawn.tokens_per_second is not None:
        low, high = drawn.interval
        measurement = Measurement(
            drawn.tokens_per_second, (low, high), 1.0, 1, 0, False, 0.0, (), (), alloc_retries=0
        )
    outcome = ProbeOutcome(drawn.status, drawn.row.message, drawn.seconds, measurement)
    return TrialRecord(number, config, role, {}, {}, Path(config), outcome, {})
