"""The best of what was measured: finalists, winner and gain, from records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from titan_tune.domain.probe import Origin
from titan_tune.errors import InputError
from titan_tune.study.records import Role, TrialRecord, completed

REPEAT_SPREAD = 0.03
"""How far two runs of one configuration may lie apart on a shared machine; seen on H200s."""


@dataclass(frozen=True)
class Standing:
    """One configuration with everything it was measured at.

    When a configuration took part in the finals only those runs count: they were interleaved with the
    baseline, so a drift of the machine meets all of them, and being picked for a lucky first run no longer helps.
    """

    config_id: str
    runs: tuple[TrialRecord, ...]
    """Every completed run, oldest first."""
    final: bool

    @property
    def counted(self) -> tuple[TrialRecord, ...]:
        """The runs that decide."""
        finals = tuple(r for r in self.runs if r.role is Role.FINALIST)
        return finals if self.final and finals else self.runs

    @property
    def tokens_per_second(self) -> float:
        """Median over the counted runs, tokens/s per GPU."""
        return statistics.median(r.tokens_per_second or 0.0 for r in self.counted)

    @property
    def interval(self) -> tuple[float, float]:
        """Hull of the counted runs' intervals."""
        intervals = [r.measurement.interval for r in self.counted if r.measurement]
        return min(low for low, _ in intervals), max(high for _, high in intervals)

    @property
    def origin(self) -> Origin:
        """Where the throughput comes from; the weakest of the counted runs."""
        origins = {r.outcome.origin for r in self.counted}
        return Origin.DRY_RUN if Origin.DRY_RUN in origins else Origin.MEASURED

    @property
    def spread(self) -> float:
        """(Largest - smallest) / median over every completed run; 0 for a single run."""
        values = [r.tokens_per_second or 0.0 for r in self.runs]
        return (max(values) - min(values)) / statistics.median(values)

    @property
    def latest(self) -> TrialRecord:
        """The newest counted run."""
        return self.counted[-1]


def standings(records: Sequence[TrialRecord]) -> list[Standing]:
    """Measured configurations, best first; those of the finals come before the others once finals ran."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in completed(records):
        groups.setdefault(record.config_id, []).append(record)
    finals = {r.config_id for r in completed(records) if r.role is Role.FINALIST}
    if finals <= {baseline_id(records)}:
        finals = set()  # cut off before any finalist ran: there is nothing to decide by
    found = [Standing(config, tuple(runs), config in finals) for config, runs in groups.items()]
    return sorted(found, key=lambda s: (not s.final, -s.tokens_per_second, s.config_id))


def baseline_id(records: Sequence[TrialRecord]) -> str | None:
    """Config id of the user's own job, once it was run."""
    return next((r.config_id for r in records if r.role is Role.BASELINE), None)


def finalists(records: Sequence[TrialRecord], *, count: int) -> list[str]:
    """Config ids of the best configurations of the exploration, best first, the baseline left out.

    At most ``count``, and only those that may yet turn out the best: a clear winner needs no repeat of losers.
    """
    base = baseline_id(records)
    explored = [r for r in records if r.role is not Role.FINALIST]
    ranked = [s for s in standings(explored) if s.config_id != base]
    return [s.config_id for s in ranked[:count] if _may_beat(s, ranked[0])]


def _may_beat(standing: Standing, best: Standing) -> bool:
    """Whether repeats could put it first: what was measured is close, or too uncertain to tell."""
    is_close = standing.tokens_per_second >= (1.0 - REPEAT_SPREAD) * best.tokens_per_second
    return is_close or standing.interval[1] >= best.interval[0]


def final_schedule(records: Sequence[TrialRecord], *, count: int, repeats: int) -> list[str]:
    """Config ids still to run in the finals, in order: baseline, first, second, third, and again.

    Interleaved, so that slow drift of the machine is shared. What already ran is left out, so a resumed
    search goes on where it stopped.
    """
    chosen = finalists(records, count=count)
    if not chosen:
        return []
    base = baseline_id(completed(records))
    line_up = [*([base] if base else []), *chosen]
    if len(line_up) < 2:
        return []
    done: dict[str, int] = {}
    for record in records:
        if record.role is Role.FINALIST and record.outcome.status.is_about_the_configuration:
            done[record.config_id] = done.get(record.config_id, 0) + 1
    schedule = []
    for round_number in range(repeats):
        schedule += [config for config in line_up if done.get(config, 0) <= round_number]
    return schedule


@dataclass(frozen=True)
class Winner:
    """The configuration to export."""

    standing: Standing
    baseline: Standing | None

    @property
    def gain(self) -> float | None:
        """Throughput over the baseline, minus one; ``None`` without a measured baseline."""
        if self.baseline is None:
            return None
        return self.standing.tokens_per_second / self.baseline.tokens_per_second - 1.0

    @property
    def gain_origin(self) -> Origin:
        """Measured only where both sides are."""
        sides = [self.standing, *([self.baseline] if self.baseline else [])]
        dry = any(side.origin is Origin.DRY_RUN for side in sides)
        return Origin.DRY_RUN if dry else Origin.MEASURED

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """The gain from the worst and the best corner of both intervals."""
        if self.baseline is None:
            return None
        (low, high), (base_low, base_high) = self.standing.interval, self.baseline.interval
        return low / base_high - 1.0, high / base_low - 1.0


def winner(records: Sequence[TrialRecord]) -> Winner | None:
    """The best measured configuration, beside the baseline; ``None`` when nothing was measured.

    Among those that went through the finals when there were any; the baseline itself can win.
    """
    ranked = standings(records)
    if not ranked:
        return None
    base = baseline_id(records)
    return Winner(ranked[0], next((s for s in ranked if s.config_id == base), None))


def roomier(records: Sequence[TrialRecord]) -> Standing | None:
    """What to take where the winner had to retry allocations: the fastest that had none, uses less memory and is
    within the winner's interval. ``None`` where the winner had none either, or nothing is as good."""
    ranked = standings(records)
    if not ranked or not _retried(ranked[0]):
        return None
    best = ranked[0]
    others = (s for s in ranked[1:] if s.tokens_per_second >= best.interval[0] and not _retried(s))
    return next((s for s in others if _peak(s) < _peak(best)), None)


def _retried(standing: Standing) -> bool:
    return any(r.measurement.alloc_retries > 0 for r in standing.runs if r.measurement)


def _peak(standing: Standing) -> int:
    return max(r.measurement.peak_reserved_bytes for r in standing.runs if r.measurement)


def standing_of_trial(records: Sequence[TrialRecord], number: int) -> Standing:
    """One trial on its own.

    Raises:
        InputError: there is no such trial, or it measured nothing.
    """
    record = next((r for r in records if r.number == number), None)
    if record is None:
        known = ", ".join(str(r.number) for r in completed(records)) or "none"
        raise InputError(f"--trial: there is no trial {number}; measured trials: {known}")
    if record.measurement is None:
        raise InputError(
            f"--trial: trial {number} measured nothing: {record.outcome.status}: {record.outcome.message}"
        )
    return Standing(record.config_id, (record,), final=False)


def pareto_front(records: Sequence[TrialRecord]) -> list[Standing]:
    """Configurations that no other beats in both throughput and peak memory, fastest first."""
    front: list[Standing] = []
    lowest = float("inf")
    for standing in sorted(standings(records), key=lambda s: -s.tokens_per_second):
        measurement = standing.latest.measurement
        peak = measurement.peak_device_bytes if measurement else float("inf")
        if peak < lowest:
            front.append(standing)
            lowest = peak
    return front
