"""The candidates that a search chooses among, and what one probe has to say about each of them.

Two candidates have in common what their labels have: a label's effect, a pair of labels' effect, and for the same
candidate a remainder of its own. Labels that are alike share part of their effects (``study.similarity``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from titan_tune.study.similarity import label_similarity

Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
"""Encoded candidates: a row each axis, with the number of every candidate's label."""

# Standard deviations of the effects in log(measured / predicted), at scale 1. From the step-time model's residuals on
# H200 rows: a label's effect is what a roofline gets wrong about it.
SD_LABEL = 0.06
SD_PAIR = 0.02
SD_CANDIDATE = 0.012
EFFECTIVE_AXES = 4
"""Labels' variances add up over at most this many axes."""
DEFAULT_SECONDS = 60.0
"""What a probe takes where nobody guessed; seen on H200: 24 to 60 s, more with max-autotune."""


@dataclass(frozen=True, slots=True)
class PoolItem:
    """A candidate as the proposer sees it."""

    config_id: str
    choices: Mapping[str, str]
    predicted: float
    """Predicted tokens/s per GPU (any positive scale)."""
    success: float = 1.0
    """Chance that it fits, from the memory estimate."""
    seconds: float = DEFAULT_SECONDS
    """Guessed duration of its probe (any positive scale)."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A finished probe."""

    item: PoolItem
    measured: float | None
    """Tokens/s per GPU; ``None`` when it failed for a reason of the configuration."""
    seconds: float | None = None
    """How long it took, where that is known."""
    noise: float = 0.0
    """Standard error of ``measured`` as a fraction of it, from its steps; runs differ by a little more."""


@dataclass(frozen=True)
class Pool:
    """Candidates with what every proposal asks of them; make it once for a search."""

    items: tuple[PoolItem, ...]
    axes: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    """Of every axis; a candidate's code is a place in here."""
    codes: Codes
    log_predicted: Array
    success: Array
    log_seconds: Array
    _common: dict[tuple[str, ...], Common] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, items: Sequence[PoolItem], axes: Sequence[str] | None = None) -> Pool:
        """The pool of these candidates, in their order; ``axes`` defaults to all that they choose on."""
        if axes is None:
            axes = sorted({axis for item in items for axis in item.choices})
        labels, columns = [], []
        for axis in axes:
            numbers: dict[str, int] = {}
            columns.append([numbers.setdefault(item.choices.get(axis, ""), len(numbers)) for item in items])
            labels.append(tuple(numbers))
        return cls(
            items=tuple(items),
            axes=tuple(axes),
            labels=tuple(labels),
            codes=np.array(columns, dtype=np.int64).reshape(len(axes), len(items)),
            log_predicted=np.log([item.predicted for item in items]),
            success=np.array([item.success for item in items]),
            log_seconds=np.log([item.seconds for item in items]),
        )

    def common(self, other: PoolItem) -> Common:
        """What every candidate has in common with ``other``; computed once."""
        key = tuple(other.choices.get(axis, "") for axis in self.axes)
        if key not in self._common:
            self._common[key] = common(self, other)
        return self._common[key]


class Common(NamedTuple):
    """What candidates have in common with one other."""

    effects: Array
    """Prior covariance of their effects at scale 1, shape (candidates,)."""
    alike: tuple[Array, ...]
    """Of every axis: how alike each of the pool's labels is to the other's."""


def common(pool: Pool, other: PoolItem) -> Common:
    """What the candidates of ``pool`` have in common with ``other``, on the pool's axes."""
    count, axes = len(pool.items), len(pool.axes)
    labels, squares, equal = np.zeros(count), np.zeros(count), np.zeros(count)
    found = []
    for place, axis in enumerate(pool.axes):
        label = other.choices.get(axis, "")
        alike = np.array([label_similarity(own, label) for own in pool.labels[place]])
        codes = pool.codes[place]
        labels += alike[codes]
        squares += (alike**2)[codes]
        equal += (alike == 1.0)[codes]
        found.append(alike)
    return Common(_effects(labels, squares, equal, axes), tuple(found))


def _effects(labels: Array, squares: Array, equal: Array, axes: int) -> Array:
    """From the sums over the axes of similarities, of their squares, and of equal labels."""
    covariance: Array = SD_CANDIDATE**2 * (equal == axes)
    if axes:
        covariance += SD_LABEL**2 * min(axes, EFFECTIVE_AXES) / axes * labels
        covariance += SD_PAIR**2 / 2 * (labels**2 - squares)  # products over the pairs of axes
    return covariance


def effects_variance(axes: int) -> float:
    """Prior variance of any candidate's effects at scale 1."""
    whole = np.array([float(axes)])
    return float(_effects(whole, whole, whole, axes)[0])
