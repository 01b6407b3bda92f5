"""The statistics of step times: medians with bootstrap intervals. Pure and deterministic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, quantiles, stdev
from typing import Final

from titan_tune.domain.probe import StepRecord

CONFIDENCE: Final = 0.95

NOISE_BOUND: Final = 0.05
"""How far below the true median of a probe's throughput the best of its first measured steps may lie, relative.
Beyond it :func:`cannot_win` could be wrong; within it, it never is."""

MINIMUM_TO_JUDGE: Final = 3
"""Measured steps before a probe may be given up."""


def median_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = 1000
) -> tuple[float, float, float]:
    """``(median, low, high)``: the median and its 95 % percentile-bootstrap interval.

    The same values give the same interval. Raises ValueError for no values.
    """
    if not values:
        raise ValueError("the median of no values")
    generator = random.Random(seed)
    count = len(values)
    medians = sorted(median(generator.choices(values, k=count)) for _ in range(resamples))
    tail = (1 - CONFIDENCE) / 2
    low = medians[round(tail * (resamples - 1))]
    high = medians[round((1 - tail) * (resamples - 1))]
    centre = median(values)
    return centre, min(low, centre), max(high, centre)


def measured(records: Sequence[StepRecord], warmup: int) -> tuple[StepRecord, ...]:
    """The records after the first ``warmup`` steps, which compile, tune and fill caches."""
    return tuple(record for record in records if record.step > warmup)


def is_tight(values: Sequence[float], *, minimum: int, target_relative_interval: float) -> bool:
    """Whether enough values are there and their median's interval, full width over median, is narrow enough."""
    if len(values) < minimum:
        return False
    centre, low, high = median_interval(values)
    return centre > 0 and (high - low) / centre <= target_relative_interval


def cannot_win(throughputs: Sequence[float], beat: float | None) -> bool:
    """Whether a probe's true median throughput is below ``beat``, by what its measured steps say so far.

    The upper end of what the median can be is the best step seen, raised by ``NOISE_BOUND``. The best of n steps
    is below the median with probability 2^-n whatever the distribution; the bound covers that and drift.
    """
    if beat is None or len(throughputs) < MINIMUM_TO_JUDGE:
        return False
    return max(throughputs) < beat * (1 - NOISE_BOUND)


def jitter(values: Sequence[float]) -> float | None:
    """(90th percentile - 10th percentile) / median; ``None`` for fewer than four values."""
    if len(values) < 4:
        return None
    tenths = quantiles(values, n=10, method="inclusive")
    return (tenths[8] - tenths[0]) / median(values)


def loss_noise(losses: Sequence[float]) -> float:
    """Standard deviation of a loss around its trend, from the differences of neighbours.

    A trend shifts all differences alike, so it does not count; each difference has twice the variance
    of one loss. 0 where there are fewer than three losses.
    """
    if len(losses) < 3:
        return 0.0
    return stdev(after - before for before, after in pairwise(losses)) / 2**0.5


def loss_gap(losses: Sequence[float], baseline: Sequence[float], *, window: int = 5) -> float:
    """Mean difference to the baseline over the last ``window`` steps that both have; 0 where none."""
    common = min(len(losses), len(baseline))
    if common == 0:
        return 0.0
    first = max(0, common - window)
    return fmean(losses[i] - baseline[i] for i in range(first, common))
