"""The answer of a study and what it cost: winner, gain, memory, numerics, break-even. Pure."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import Origin
from titan_tune.study.info import StudyInfo
from titan_tune.study.numerics import layout_effects
from titan_tune.study.records import TrialRecord
from titan_tune.study.selection import Standing, Winner
from titan_tune.units import gib

SECONDS_PER_HOUR = 3600.0

Choices = tuple[tuple[str, str], ...]
"""Axis and label, in axis order."""


@dataclass(frozen=True, slots=True)
class Change:
    """An axis or a torchtitan key, as it was and as it is now. ``before`` is ``None`` where it is not known."""

    name: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Measured peak of the worst rank over a configuration's runs, GiB.

    ``kind`` is ``cuda`` (the allocator's figures) or ``rss`` (resident set size; all three are the same). With a dry
    run among the runs the worst rank is one of those that ran, and ``device_gib`` is reserved memory and the model's
    figure for what lies outside the allocator.
    """

    kind: str
    active_gib: float
    reserved_gib: float
    device_gib: float
    alloc_retries: int
    origin: Origin = Origin.MEASURED


@dataclass(frozen=True, slots=True)
class Answer:
    """The winner beside the job as it was. Throughputs are tokens/s per GPU, from where their origins say."""

    config_id: str
    trial: int
    choices: Choices
    is_baseline: bool
    final: bool
    runs: int
    counted_runs: int
    tokens_per_second: float
    interval: tuple[float, float]
    baseline_tokens_per_second: float | None
    baseline_interval: tuple[float, float] | None
    gain: float | None
    """Over the baseline, minus one; ``None`` without a throughput of the baseline."""
    gain_interval: tuple[float, float] | None
    origin: Origin
    baseline_origin: Origin | None
    gain_origin: Origin
    """Measured only where both throughputs are."""
    memory: Memory
    numerics: tuple[Change, ...]
    """Axes that change the mathematics and differ from the job as it was."""
    layout_effects: tuple[str, ...]
    """What the layout does to the mathematics and that of the job as it was does not, one line each."""
    keys: tuple[Change, ...]
    """torchtitan keys that differ from the job file."""

    @property
    def changes_numerics(self) -> bool:
        """Whether anything sets its mathematics apart from that of the job as it was."""
        return bool(self.numerics or self.layout_effects)

    @property
    def gain_is_certain(self) -> bool:
        """Whether the whole interval of the gain lies above zero."""
        return self.gain_interval is not None and self.gain_interval[0] > 0.0


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Hours of training, at the job's old speed, after which the search has paid for itself."""

    hours: float
    earliest_hours: float
    latest_hours: float | None
    """``None``: at the low end of the gain's interval the search never pays."""


@dataclass(frozen=True, slots=True)
class Price:
    """What the search used. ``statuses`` counts the probes by how they ended."""

    probes: int
    """With the dry runs."""
    dry_runs: int
    measured: int
    """Probes and dry runs that gave figures."""
    statuses: tuple[tuple[str, int], ...]
    gpu_hours: float
    world_size: int
    break_even: BreakEven | None


def break_even_hours(gpu_hours: float, *, world_size: int, gain: float) -> float:
    """Hours of training at the old speed that must be ahead for a search to save what it cost.

    ``H`` hours of the old job take ``H / (1 + gain)`` now, so they save ``H * gain / (1 + gain)`` on
    ``world_size`` GPUs; this is the ``H`` where that equals ``gpu_hours``. Infinite without a gain.
    """
    if gain <= 0.0:
        return math.inf
    return gpu_hours / world_size / (gain / (1.0 + gain))


def price(records: Sequence[TrialRecord], answer: Answer | None, *, world_size: int) -> Price:
    """Probes, GPU-hours and the break-even; every GPU of the job counts while a probe runs, of a dry run one."""
    gpu_hours = sum(r.outcome.gpu_seconds(world_size) for r in records) / SECONDS_PER_HOUR
    counts = Counter(str(r.outcome.status) for r in records)
    return Price(
        probes=len(records),
        dry_runs=sum(r.outcome.origin is Origin.DRY_RUN for r in records),
        measured=sum(r.measurement is not None for r in records),
        statuses=tuple(counts.most_common()),
        gpu_hours=gpu_hours,
        world_size=world_size,
        break_even=_break_even(gpu_hours, answer, world_size),
    )


def _break_even(gpu_hours: float, answer: Answer | None, world_size: int) -> BreakEven | None:
    if answer is None or answer.gain is None or answer.gain_interval is None or answer.gain <= 0.0:
        return None
    low, high = answer.gain_interval
    latest = break_even_hours(gpu_hours, world_size=world_size, gain=low)
    return BreakEven(
        hours=break_even_hours(gpu_hours, world_size=world_size, gain=answer.gain),
        earliest_hours=break_even_hours(gpu_hours, world_size=world_size, gain=high),
        latest_hours=latest if math.isfinite(latest) else None,
    )


def answer(
    info: StudyInfo,
    best: Winner,
    *,
    start: Mapping[str, str],
    start_values: Mapping[str, Value] | None = None,
) -> Answer:
    """The winner as the report states it; ``start`` and ``start_values`` are the choices and keys of the job as it
    was, if they are known."""
    standing, base = best.standing, best.baseline
    record = standing.latest
    return Answer(
        config_id=standing.config_id,
        trial=record.number,
        choices=tuple(record.choices.items()),
        is_baseline=base is not None and base.config_id == standing.config_id,
        final=standing.final,
        runs=len(standing.runs),
        counted_runs=len(standing.counted),
        tokens_per_second=standing.tokens_per_second,
        interval=standing.interval,
        baseline_tokens_per_second=base.tokens_per_second if base else None,
        baseline_interval=base.interval if base else None,
        gain=best.gain,
        gain_interval=best.gain_interval,
        origin=standing.origin,
        baseline_origin=base.origin if base else None,
        gain_origin=best.gain_origin,
        memory=memory_of(standing),
        numerics=numerics(info, record.choices, start),
        layout_effects=layout_effects(info.base(), info.cluster, record.values, start_values or {}),
        keys=changed_keys(info, record.values),
    )


def memory_of(standing: Standing) -> Memory:
    """The worst rank of the worst run of a configuration."""
    measured = [r.measurement for r in standing.runs if r.measurement]
    return Memory(
        kind=measured[-1].memory_kind,
        active_gib=gib(max(m.peak_active_bytes for m in measured)),
        reserved_gib=gib(max(m.peak_reserved_bytes for m in measured)),
        device_gib=gib(max(m.peak_device_bytes for m in measured)),
        alloc_retries=max(m.alloc_retries for m in measured),
        origin=Origin.DRY_RUN if any(m.origin is Origin.DRY_RUN for m in measured) else Origin.MEASURED,
    )


def changed_keys(info: StudyInfo, values: Mapping[str, Value]) -> tuple[Change, ...]:
    """torchtitan keys whose value differs from the job file's, by name."""
    base = info.base()
    return tuple(
        Change(key, shown(base.get(key)), shown(value))
        for key, value in sorted(values.items())
        if base.get(key) != value
    )


def shown(value: Value) -> str:
    """A TOML value for people."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def numerics(info: StudyInfo, choices: Mapping[str, str], start: Mapping[str, str]) -> tuple[Change, ...]:
    """Axes that change the mathematics and do not have the label of the job as it was."""
    return tuple(
        Change(axis, start.get(axis), choices[axis])
        for axis in info.numerics_axes
        if axis in choices and choices[axis] != start.get(axis)
    )


def median(values: Sequence[float]) -> float | None:
    """The median, or ``None`` of nothing."""
    return statistics.median(values) if values else None
