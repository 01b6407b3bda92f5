"""Which candidate to measure next.

The step-time model predicts every candidate; what probes measured corrects it. The correction, the
logarithm of measured over predicted throughput, is a Gaussian process over the axis labels: one offset
shared by all, one effect a label, one a pair of labels, and a remainder of the candidate's own. So a single
float8 probe teaches about every float8 candidate. The next probe is the one with the largest expected
gain over the best so far, times the chance that it runs at all, per expected second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Standard deviations of log(measured / predicted), from the step-time model's residuals on H200 rows:
# the common offset is what differs between machines, a label's effect is what a roofline gets wrong about it.
SD_OFFSET = 0.30
SD_LABEL = 0.12
SD_PAIR = 0.04
SD_CANDIDATE = 0.03
SD_NOISE = 0.01

PRIOR_SUCCESSES = 8.0
PRIOR_FAILURES = 0.5


@dataclass(frozen=True, slots=True)
class PoolItem:
    """A candidate as the proposer sees it."""

    config_id: str
    choices: Mapping[str, str]
    predicted: float
    """Predicted tokens/s per GPU (any positive scale)."""
    success: float = 1.0
    """Chance that it fits, from the memory estimate."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A finished probe: ``measured`` is ``None`` when it failed for a reason of the configuration."""

    choices: Mapping[str, str]
    predicted: float
    measured: float | None


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
    """Expected improvement over the best so far, as a fraction of it."""


def encode(items: Sequence[Mapping[str, str]], axes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Labels as integers, shape (len(items), len(axes)); equal labels of an axis share a number."""
    tables: list[dict[str, int]] = [{} for _ in axes]
    return np.array(
        [
            [
                table.setdefault(item.get(axis, ""), len(table))
                for axis, table in zip(axes, tables, strict=True)
            ]
            for item in items
        ],
        dtype=np.int64,
    ).reshape(len(items), len(axes))


def kernel(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> Array:
    """Prior covariance of the log correction between two sets of encoded candidates."""
    same = a[:, None, :] == b[None, :, :]
    result = np.full(same.shape[:2], SD_OFFSET**2)
    if a.shape[1]:
        result += SD_LABEL**2 * same.mean(axis=2) * min(a.shape[1], 4)
        pairs = list(combinations(range(a.shape[1]), 2))
        if pairs:
            both = sum((same[:, :, i] & same[:, :, j]).astype(np.float64) for i, j in pairs)
            result += SD_PAIR**2 * both
    result += SD_CANDIDATE**2 * same.all(axis=2)
    return result


def posterior(
    pool: npt.NDArray[np.int64], seen: npt.NDArray[np.int64], log_ratios: Array
) -> tuple[Array, Array]:
    """Mean and standard deviation of the log correction for every pool entry."""
    variance = np.full(len(pool), kernel(pool[:1], pool[:1])[0, 0]) if len(pool) else np.zeros(0)
    if not len(seen):
        return np.zeros(len(pool)), np.sqrt(variance)
    noisy = kernel(seen, seen) + SD_NOISE**2 * np.eye(len(seen))
    cross = kernel(pool, seen)
    solved = np.linalg.solve(noisy, np.column_stack([log_ratios, cross.T]))
    mean = cross @ solved[:, 0]
    variance = variance - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return mean, np.sqrt(np.maximum(variance, 1e-12))


def failure_weight(
    pool: npt.NDArray[np.int64], seen: npt.NDArray[np.int64], failed: npt.NDArray[np.bool_]
) -> Array:
    """Chance of success of every pool entry: probes count by how many labels they share with it."""
    if not len(seen):
        return np.full(len(pool), PRIOR_SUCCESSES / (PRIOR_SUCCESSES + PRIOR_FAILURES))
    similarity = (
        (pool[:, None, :] == seen[None, :, :]).mean(axis=2) ** 4
        if pool.shape[1]
        else np.ones((len(pool), len(seen)))
    )
    bad = PRIOR_FAILURES + 8.0 * similarity[:, failed].sum(axis=1)
    good = PRIOR_SUCCESSES + 8.0 * similarity[:, ~failed].sum(axis=1)
    return np.asarray(good / (good + bad))


def expected_improvement(mean: Array, sd: Array, best: float) -> Array:
    """Expected gain of a log-normal over ``best``, in the units of ``best`` (mean and sd are of the logarithm)."""
    z = (mean + sd**2 - math.log(best)) / sd
    z0 = (mean - math.log(best)) / sd
    gain = np.exp(mean + sd**2 / 2) * _cdf(z) - best * _cdf(z0)
    return np.maximum(gain, 0.0)


def _cdf(z: Array) -> Array:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])


def propose(
    pool: Sequence[PoolItem], observations: Sequence[Observation], *, excluded: frozenset[str] = frozenset()
) -> Proposal | None:
    """The next candidate to measure, or ``None`` when every one is excluded.

    Deterministic: ties go to the candidate that is earlier in the pool. ``excluded`` are config ids that are
    measured, failed or in flight.
    """
    open_items = [i for i, item in enumerate(pool) if item.config_id not in excluded]
    if not open_items:
        return None
    axes = sorted({axis for item in pool for axis in item.choices})
    codes = encode([pool[i].choices for i in open_items] + [o.choices for o in observations], axes)
    codes, seen = codes[: len(open_items)], codes[len(open_items) :]
    measured = np.array([o.measured is not None for o in observations], dtype=bool)
    ratios = np.array([math.log(o.measured / o.predicted) for o in observations if o.measured is not None])
    mean, sd = posterior(codes, seen[measured] if len(seen) else seen, ratios)
    log_predicted = np.log([pool[i].predicted for i in open_items])
    mean = mean + log_predicted
    success = failure_weight(codes, seen, ~measured) * np.array([pool[i].success for i in open_items])
    values = [o.measured for o in observations if o.measured is not None]
    if values:
        best = max(values)
        gain = expected_improvement(mean, sd, best) * success
        index = int(np.argmax(gain))
        relative = float(gain[index] / best)
    else:
        index = int(np.argmax(np.exp(mean) * success))
        relative = math.inf
    return Proposal(
        index=open_items[index],
        expected=math.exp(mean[index]),
        interval=(math.exp(mean[index] - 1.96 * sd[index]), math.exp(mean[index] + 1.96 * sd[index])),
        expected_gain=relative,
    )
