"""How much a search may spend, and how much of it is kept for the finalists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titan_tune.domain.probe import ProbeSettings, ProbeStatus
from titan_tune.space.axes import Budget
from titan_tune.study.records import Role, TrialRecord

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    """What a study has used so far. Wall clock counts this run of the command only."""

    probes: int
    gpu_seconds: float
    wall_seconds: float

    @classmethod
    def of(cls, records: Sequence[TrialRecord], *, world_size: int, wall_seconds: float) -> Spent:
        """Cancelled probes cost GPU time but are not counted as probes: they run again on resume."""
        probes = sum(r.outcome.status is not ProbeStatus.CANCELLED for r in records)
        gpu_seconds = sum(r.outcome.gpu_seconds(world_size) for r in records)
        return cls(probes, gpu_seconds, wall_seconds)


def final_runs(
    budget: Budget, settings: ProbeSettings, *, pool_size: int, measured: int | None = None
) -> int:
    """Probes kept back for the finals: the finalists and the baseline, once per repeat.

    ``measured`` are the configurations measured so far, the baseline left out: the finals need no more runs than
    those and the one that would start next. At most half of ``max_probes``, so that a small budget still
    explores; 0 when there is nothing to compare.
    """
    known = pool_size if measured is None else min(pool_size, measured + 1)
    finalists = min(settings.finalists, known)
    runs = (finalists + 1) * settings.finalist_repeats if finalists and pool_size > 1 else 0
    if budget.max_probes is not None:
        runs = min(runs, budget.max_probes // 2)
    return runs if runs > 1 else 0  # the baseline alone decides nothing


def exhausted(
    budget: Budget,
    spent: Spent,
    *,
    world_size: int,
    next_seconds: float,
    reserved_runs: int,
    in_flight: int = 0,
) -> str | None:
    """Why no further probe may start, or ``None``.

    ``next_seconds`` is what one probe is expected to take; ``reserved_runs`` are probes that must still fit after it.
    """
    runs = 1 + reserved_runs + in_flight
    if budget.max_probes is not None and spent.probes + runs > budget.max_probes:
        return f"budget of {budget.max_probes} probe{'' if budget.max_probes == 1 else 's'}"
    if budget.max_gpu_hours is not None:
        limit = budget.max_gpu_hours * SECONDS_PER_HOUR
        if spent.gpu_seconds + runs * next_seconds * world_size > limit:
            return f"budget of {budget.max_gpu_hours:g} GPU-hours"
    if budget.max_wall_clock_hours is not None:
        limit = budget.max_wall_clock_hours * SECONDS_PER_HOUR
        if spent.wall_seconds + (1 + reserved_runs) * next_seconds > limit:
            return f"budget of {budget.max_wall_clock_hours:g} hours of wall clock"
    return None


def remaining_seconds(budget: Budget, spent: Spent, *, world_size: int) -> float | None:
    """Wall-clock seconds that one probe may take before it would break the budget; ``None`` without a limit."""
    limits = []
    if budget.max_gpu_hours is not None:
        limits.append((budget.max_gpu_hours * SECONDS_PER_HOUR - spent.gpu_seconds) / world_size)
    if budget.max_wall_clock_hours is not None:
        limits.append(budget.max_wall_clock_hours * SECONDS_PER_HOUR - spent.wall_seconds)
    return max(0.0, min(limits)) if limits else None


def expected_seconds(records: Sequence[TrialRecord], *, default: float) -> float:
    """Mean duration of the probes so far, or ``default`` before the first."""
    times = [r.outcome.seconds for r in records if r.role in (Role.BASELINE, Role.PROBE, Role.FINALIST)]
    return sum(times) / len(times) if times else default
