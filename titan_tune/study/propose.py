"""Which candidate to measure next.

The step-time model predicts every candidate; what probes measured corrects it (``study.correction``), so that a single
float8 probe teaches about every float8 candidate. How wrong the model is, is not known beforehand: several
``SCALES`` are weighed by how well each explains the probes. How long a probe takes is learned in the same way, from a
guess for every candidate.

The next probe is the one with the largest expected gain over the best so far, times the chance that it runs at all
(``study.failures``), per expected second. The gain allows for a surprise: a model that was right so far may still be
wrong about a label that was never tried, by more than those scales make likely. Probes in flight count as if they had
measured what is expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from titan_tune.study.correction import DURATION, Seen, posterior_mean, speed_correction
from titan_tune.study.failures import success_chance
from titan_tune.study.pool import Array, Observation, Pool, PoolItem, effects_variance

__all__ = ["Observation", "Outlook", "Pool", "PoolItem", "Proposal", "outlook", "propose"]

FAILURE_SHARE = 0.6
"""Of a probe's seconds, when it fails: most fail at or before the first step."""
SURPRISE_CHANCE, SURPRISE = 0.1, 0.15
"""Chance that the model is wrong altogether about a label, whatever it got right elsewhere, and the standard deviation
of what such a label is worth in log(measured / predicted)."""
WORTHWHILE = 0.9
"""Only candidates with at least this share of the largest expected gain compete on seconds."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to run next and why."""

    index: int
    """Position in the pool."""
    expected: float
    """Posterior mean of tokens/s per GPU."""
    interval: tuple[float, float]
    """95 % posterior interval."""
    expected_gain: float
    """Expected improvement over the best so far, as a fraction of it; infinite before anything was measured."""
    success: float
    """Chance that it runs."""
    seconds: float
    """Expected duration of its probe."""


HOPELESS = 6.0
"""Standard deviations below the best so far from which on nothing is gained: less than a billionth of one."""


def expected_improvement(mean: Array, sd: Array, best: float) -> Array:
    """Expected gain of a log-normal over ``best``, in the units of ``best`` (mean and sd are of the logarithm)."""
    gain = np.zeros(len(mean))
    hopeful = mean - math.log(best) > -HOPELESS * sd
    mean, sd = mean[hopeful], sd[hopeful]
    z0 = (mean - math.log(best)) / sd
    gain[hopeful] = np.exp(mean + sd**2 / 2) * _cdf(z0 + sd) - best * _cdf(z0)
    return np.maximum(gain, 0.0)


def _cdf(z: Array) -> Array:
    # numpy has no erfc; mapped over a list it costs a fifth of what a loop over the array does
    return 0.5 * np.fromiter(map(math.erfc, (-z / math.sqrt(2.0)).tolist()), dtype=np.float64, count=len(z))


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of candidates after the probes so far; arrays of one length."""

    log_mean: Array
    """Of log tokens/s per GPU."""
    sd: Array
    success: Array
    """Chance that each runs."""
    seconds: Array
    """Expected duration of a probe that runs through."""
    surprise: Array
    """Chance that the model is wrong altogether about a label that no probe has had yet."""
    best: float | None
    """Highest tokens/s per GPU of what was measured or is in flight, as the probes together say."""

    def of(self, rows: npt.NDArray[np.intp]) -> Outlook:
        """Only of some candidates."""
        return Outlook(
            log_mean=self.log_mean[rows],
            sd=self.sd[rows],
            success=self.success[rows],
            seconds=self.seconds[rows],
            surprise=self.surprise[rows],
            best=self.best,
        )

    def gains(self) -> Array:
        """Expected gain over ``best``, as a fraction of it, of candidates that run.

        Raises:
            ValueError: nothing was measured and nothing is in flight.
        """
        if self.best is None:
            raise ValueError("there is nothing yet to gain over")
        wide = np.hypot(self.sd, SURPRISE)
        usual, unusual = (expected_improvement(self.log_mean, sd, self.best) for sd in (self.sd, wide))
        return ((1.0 - self.surprise) * usual + self.surprise * unusual) / self.best


def outlook(pool: Pool, observations: Sequence[Observation], *, pending: Sequence[PoolItem] = ()) -> Outlook:
    """What is expected of the pool's candidates."""
    ran = [(o, o.measured) for o in observations if o.measured is not None]
    known, variance = [o.item for o, _ in ran], effects_variance(len(pool.axes))
    seen = Seen(
        among=_among(known, pool.axes),
        log_ratios=np.array([math.log(measured / o.item.predicted) for o, measured in ran]),
        noise=np.array([o.noise for o, _ in ran]),
    )
    if pending:
        believed = speed_correction(_effects_of(Pool.of(pending, pool.axes), known), variance, seen).mean
        known += pending
        seen = Seen(
            among=_among(known, pool.axes),
            log_ratios=np.concatenate([seen.log_ratios, believed]),
            noise=np.concatenate([seen.noise, np.zeros(len(pending))]),
        )
    cross = _effects_of(pool, known)
    speed, known_speed = speed_correction(cross, variance, seen), speed_correction(seen.among, variance, seen)
    log_known = known_speed.mean + np.log([item.predicted for item in known])
    return Outlook(
        log_mean=speed.mean + pool.log_predicted,
        sd=speed.sd,
        success=success_chance(pool, observations),
        surprise=_surprise_chance(pool, known),
        seconds=np.exp(pool.log_seconds + _duration_correction(cross, seen.among, ran)),
        best=math.exp(log_known.max()) if known else None,
    )


def _duration_correction(cross: Array, among: Array, ran: Sequence[tuple[Observation, float]]) -> Array:
    """Of log(measured / guessed seconds); ``cross`` and ``among`` begin with the probes that ran."""
    places = [place for place, (o, _) in enumerate(ran) if o.seconds is not None]
    slower = np.array([math.log(o.seconds / o.item.seconds) for o, _ in ran if o.seconds is not None])
    seen = Seen(among[np.ix_(places, places)], slower, np.zeros(len(places)))
    return posterior_mean(cross[places], seen, DURATION)


def _surprise_chance(pool: Pool, known: Sequence[PoolItem]) -> Array:
    """From the labels of each candidate that no known one has; one like theirs counts in part."""
    unseen = np.zeros(len(pool.items))
    alike = [pool.common(item).alike for item in known]
    for axis, labels in enumerate(pool.labels):
        seen = np.max([np.zeros(len(labels)), *(one[axis] for one in alike)], axis=0)
        unseen += (1.0 - seen)[pool.codes[axis]]
    return np.asarray(1.0 - (1.0 - SURPRISE_CHANCE) ** unseen)


def _effects_of(pool: Pool, others: Sequence[PoolItem]) -> Array:
    return np.array([pool.common(item).effects for item in others]).reshape(len(others), len(pool.items))


def _among(items: Sequence[PoolItem], axes: Sequence[str]) -> Array:
    return _effects_of(Pool.of(items, axes), items)


def propose(
    pool: Pool | Sequence[PoolItem],
    observations: Sequence[Observation],
    *,
    excluded: frozenset[str] = frozenset(),
    pending: Sequence[PoolItem] = (),
) -> Proposal | None:
    """The next candidate to measure, or ``None`` when every one is excluded or in flight.

    Deterministic: ties go to the candidate that is earlier in the pool. ``excluded`` are config ids that are
    measured or failed; ``pending`` are probes in flight.
    """
    if not isinstance(pool, Pool):
        pool = Pool.of(pool)
    gone = excluded.union(item.config_id for item in pending)
    rows = np.flatnonzero([item.config_id not in gone for item in pool.items])
    if not len(rows):
        return None
    after = outlook(pool, observations, pending=pending).of(rows)
    if after.best is None:
        place, gain = int(np.argmax(np.exp(after.log_mean) * after.success)), math.inf
    else:
        gains = after.gains() * after.success
        cost = after.seconds * (after.success + FAILURE_SHARE * (1.0 - after.success))
        place = int(np.argmax(np.where(gains >= WORTHWHILE * gains.max(), gains / cost, -1.0)))
        gain = float(gains[place])
    log_mean, sd = float(after.log_mean[place]), float(after.sd[place])
    return Proposal(
        index=int(rows[place]),
        expected=math.exp(log_mean),
        interval=(math.exp(log_mean - 1.96 * sd), math.exp(log_mean + 1.96 * sd)),
        expected_gain=gain,
        success=float(after.success[place]),
        seconds=float(after.seconds[place]),
    )
