"""One trial on disk and in the study: its folder, what was predicted for it, how its outcome is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

from titan_tune.domain.probe import ProbeOutcome, ProbeStatus
from titan_tune.probe.record import outcome_to_dict
from titan_tune.study.plan import Ranked
from titan_tune.study.records import Attr
from titan_tune.study.storage import storage_errors
from titan_tune.units import GIB


def predictions(item: Ranked) -> dict[str, float]:
    """What the formula said, kept beside what was measured."""
    found: dict[str, float] = {}
    if item.memory:
        found |= {
            "active_gib": item.memory.active_bytes / GIB,
            "reserved_gib": item.memory.reserved_bytes / GIB,
            "device_gib": item.memory.device_bytes / GIB,
        }
    if item.step_time:
        found["tokens_per_second_per_gpu"] = item.step_time.tokens_per_second_per_gpu
    return found


def new_directory(study_directory: Path, config_id: str) -> Path:
    """An unused trial folder: ``trials/<config_id>``, later runs with ``-2``, ``-3``, …"""
    number = 1
    while True:
        name = config_id if number == 1 else f"{config_id}-{number}"
        directory = study_directory / "trials" / name
        if not directory.exists():
            directory.mkdir(parents=True, mode=0o700)
            return directory
        number += 1


def tell(study: optuna.Study, trial: Trial, outcome: ProbeOutcome, *, capacity_gib: float, url: str) -> None:
    """Record one outcome. Constraints are feasible at or below zero, and set on every completed trial."""
    if outcome.status is ProbeStatus.TIMEOUT and trial.user_attrs.get(Attr.CUT_BY_BUDGET):
        message = f"stopped because the budget ended: {outcome.message}"
        outcome = dataclasses.replace(outcome, status=ProbeStatus.CANCELLED, message=message)
    with storage_errors(url):
        trial.set_user_attr(Attr.OUTCOME, outcome_to_dict(outcome))
        measurement = outcome.measurement
        if outcome.status is ProbeStatus.COMPLETED and measurement is not None:
            excess = measurement.peak_device_bytes / GIB - capacity_gib
            trial.set_constraint("memory", excess if measurement.memory_kind == "cuda" else 0.0)
            study.tell(trial, measurement.tokens_per_second_per_gpu)
        else:
            study.tell(trial, state=TrialState.FAIL)


def active_seconds(directory: Path) -> float:
    """How long a lost probe ran at least: from the first to the last change of a file in its folder."""
    times = [path.stat().st_mtime for path in directory.glob("*")] if directory.is_dir() else []
    return max(times) - min(times) if times else 0.0
