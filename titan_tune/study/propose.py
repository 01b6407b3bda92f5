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

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
"""Encoded candidates: a row each, a label's number in every column."""

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


@dataclass(frozen=True)
class Pool:
    """Candidates with what every proposal asks of them; make it once for a search."""

    items: tuple[PoolItem, ...]
    axes: tuple[str, ...]
    numbers: tuple[Mapping[str, int], ...]
    """Of every axis: label to number."""
    codes: Codes
    log_predicted: Array
    success: Array

    @classmethod
    def of(cls, items: Sequence[PoolItem]) -> Pool:
        """The pool of these candidates, in their order."""
        axes = tuple(sorted({axis for item in items for axis in item.choices}))
        labels = (dict.fromkeys(item.choices.get(axis, "") for item in items) for axis in axes)
        numbers = tuple({label: number for number, label in enumerate(found)} for found in labels)
        return cls(
            items=tuple(items),
            axes=axes,
            numbers=numbers,
            codes=encode([item.choices for item in items], axes, numbers),
            log_predicted=np.log([item.predicted for item in items]),
            success=np.array([item.success for item in items]),
        )


def encode(
    items: Sequence[Mapping[str, str]], axes: Sequence[str], numbers: Sequence[Mapping[str, int]] = ()
) -> Codes:
    """Labels as integers, shape (len(items), len(axes)); equal labels of an axis share a number.

    ``numbers`` are those that labels have already, a mapping an axis.
    """
    tables = [dict(known) for known in numbers] if numbers else [{} for _ in axes]
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


def shared_labels(a: Codes, b: Codes) -> Codes:
    """How many labels each of ``a`` shares with each of ``b``, shape (len(a), len(b))."""
    count = np.zeros((len(a), len(b)), dtype=np.int64)
    for axis in range(a.shape[1]):
        count += a[:, axis, None] == b[None, :, axis]
    return count


def kernel(a: Codes, b: Codes) -> Array:
    """Prior covariance of the log correction between two sets of encoded candidates.

    It depends on nothing but how many labels two candidates share.
    """
    axes = a.shape[1]
    shared = np.arange(axes + 1)
    covariance = np.full(axes + 1, SD_OFFSET**2)
    if axes:
        covariance += SD_LABEL**2 * (shared / axes) * min(axes, 4)
        covariance += SD_PAIR**2 * (shared * (shared - 1) / 2)
    covariance += SD_CANDIDATE**2 * (shared == axes)
    return covariance[shared_labels(a, b)]


def posterior(pool: Codes, seen: Codes, log_ratios: Array) -> tuple[Array, Array]:
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


def failure_weight(pool: Codes, seen: Codes, failed: npt.NDArray[np.bool_]) -> Array:
    """Chance of success of every pool entry: probes count by how many labels they share with it."""
    if not len(seen):
        return np.full(len(pool), PRIOR_SUCCESSES / (PRIOR_SUCCESSES + PRIOR_FAILURES))
    axes = pool.shape[1]
    of_shared = (np.arange(axes + 1) / axes) ** 4 if axes else np.ones(1)
    similarity = of_shared[shared_labels(pool, seen)]
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
    # numpy has no erfc; mapped over a list it costs a fifth of what a loop over the array does
    return 0.5 * np.fromiter(map(math.erfc, (-z / math.sqrt(2.0)).tolist()), dtype=np.float64, count=len(z))


def propose(
    pool: Pool | Sequence[PoolItem],
    observations: Sequence[Observation],
    *,
    excluded: frozenset[str] = frozenset(),
) -> Proposal | None:
    """The next candidate to measure, or ``None`` when every one is excluded.

    Deterministic: ties go to the candidate that is earlier in the pool. ``excluded`` are config ids that are
    measured, failed or in flight.
    """
    if not isinstance(pool, Pool):
        pool = Pool.of(pool)
    open_items = np.flatnonzero([item.config_id not in excluded for item in pool.items])
    if not len(open_items):
        return None
    codes = pool.codes[open_items]
    seen = encode([o.choices for o in observations], pool.axes, pool.numbers)
    measured = np.array([o.measured is not None for o in observations], dtype=bool)
    ratios = np.array([math.log(o.measured / o.predicted) for o in observations if o.measured is not None])
    mean, sd = posterior(codes, seen[measured] if len(seen) else seen, ratios)
    mean = mean + pool.log_predicted[open_items]
    success = failure_weight(codes, seen, ~measured) * pool.success[open_items]
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
        index=int(open_items[index]),
        expected=math.exp(mean[index]),
        interval=(math.exp(mean[index] - 1.96 * sd[index]), math.exp(mean[index] + 1.96 * sd[index])),
        expected_gain=relative,
    )
