"""What a study teaches beyond its winner: how good the predictions were, what each axis did. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from titan_tune.domain.probe import Origin
from titan_tune.report.answer import median, memory_of
from titan_tune.study.selection import Standing

TOKENS = "tokens_per_second_per_gpu"
ACTIVE = "active_gib"


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration, predicted by formula and measured."""

    config_id: str
    label: str
    predicted: float
    measured: float
    """Or, by ``origin``, from a dry run."""
    origin: Origin = Origin.MEASURED

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predictions beside measurements of one quantity."""

    points: tuple[Point, ...]
    compared: int
    """Points that the medians are of: the measured ones, or all of a study that has dry runs alone."""
    median_error: float | None
    """Median of \\|predicted / measured - 1\\|."""
    median_ratio: float | None
    """Median of measured / predicted: above 1 the prediction is too low."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One step along one axis, over pairs of configurations of one origin that differ in nothing else."""

    axis: str
    before: str
    after: str
    pairs: int
    median_ratio: float
    """Throughput with ``after`` over throughput with ``before``."""
    lowest_ratio: float
    highest_ratio: float
    origin: Origin
    median_memory_gib: float
    """Difference of peak active memory (resident set size on CPU), GiB."""


def compare_throughput(ranked: Sequence[Standing], labels: Mapping[str, str]) -> Comparison:
    """Predicted and measured tokens/s per GPU of each measured configuration."""
    return _compare(ranked, labels, TOKENS, lambda s: s.tokens_per_second)


def compare_memory(ranked: Sequence[Standing], labels: Mapping[str, str]) -> Comparison:
    """Predicted and measured peak active GiB; resident set sizes of CPU processes do not compare."""
    on_gpu = [s for s in ranked if memory_of(s).kind == "cuda"]
    return _compare(on_gpu, labels, ACTIVE, lambda s: memory_of(s).active_gib)


def _compare(
    ranked: Sequence[Standing],
    labels: Mapping[str, str],
    name: str,
    measured_of: Callable[[Standing], float],
) -> Comparison:
    points = []
    for standing in ranked:
        predicted, measured = standing.latest.predicted.get(name, 0.0), measured_of(standing)
        if predicted > 0.0 and measured > 0.0:
            label = labels[standing.config_id]
            points.append(Point(standing.config_id, label, predicted, measured, standing.origin))
    compared = [p for p in points if p.origin is Origin.MEASURED] or points
    errors = [abs(p.predicted / p.measured - 1.0) for p in compared]
    return Comparison(tuple(points), len(compared), median(errors), median([p.ratio for p in compared]))


def axis_effects(
    ranked: Sequence[Standing], axes: Mapping[str, Sequence[str]], *, start: Mapping[str, str]
) -> tuple[Effect, ...]:
    """Every effect that pairs of configurations show, in axis order; dry runs are paired with dry runs alone.

    An effect starts at the label that ``start`` (the baseline's choices) has, else at the label that the
    axis lists first.
    """
    found: dict[tuple[str, str, str, Origin], list[tuple[Standing, Standing]]] = {}
    for one, other in combinations(ranked, 2):
        axis = only_difference(one.latest.choices, other.latest.choices)
        if axis is None or one.origin is not other.origin:
            continue
        order = _order(axes.get(axis, ()), start.get(axis))
        first, second = sorted((one, other), key=lambda s: order(s.latest.choices[axis]))
        key = (axis, first.latest.choices[axis], second.latest.choices[axis], one.origin)
        found.setdefault(key, []).append((first, second))
    names = list(axes)
    return tuple(
        sorted(
            (_effect(*key, pairs) for key, pairs in found.items()),
            key=lambda e: (
                names.index(e.axis) if e.axis in names else len(names),
                _order(axes.get(e.axis, ()), start.get(e.axis))(e.before),
                _order(axes.get(e.axis, ()), start.get(e.axis))(e.after),
                e.origin,
            ),
        )
    )


def only_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The one axis in which two configurations differ; ``None`` when it is not exactly one."""
    if one.keys() != other.keys():
        return None
    differing = [axis for axis in one if one[axis] != other[axis]]
    return differing[0] if len(differing) == 1 else None


def _order(labels: Iterable[str], start: str | None) -> Callable[[str], tuple[int, str]]:
    ranks = {label: place for place, label in enumerate(labels, start=1)}
    if start is not None:
        ranks[start] = 0
    return lambda label: (ranks.get(label, len(ranks) + 1), label)


def _effect(
    axis: str, before: str, after: str, origin: Origin, pairs: Sequence[tuple[Standing, Standing]]
) -> Effect:
    ratios = [second.tokens_per_second / first.tokens_per_second for first, second in pairs]
    memory = [memory_of(second).active_gib - memory_of(first).active_gib for first, second in pairs]
    return Effect(
        axis=axis,
        before=before,
        after=after,
        pairs=len(pairs),
        origin=origin,
        median_ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        median_memory_gib=statistics.median(memory),
    )
