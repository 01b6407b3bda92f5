"""Which candidates run, by what ran and what failed so far.

A failure has a cause: a label (a compile mode that does not compile this model), a pair of labels, a number from which
on it is too much (of a local batch, alone or with another label), or nothing that other candidates share. A cause that
something which ran has as well is none. The hypotheses are up to two common causes, each as likely as it was
beforehand, times the chance that all failures which they leave out failed on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from titan_tune.study.pool import Array, Observation, Pool, PoolItem
from titan_tune.study.similarity import number

Mask = npt.NDArray[np.bool_]

ALONE = 0.06
"""Chance that a candidate fails for a reason of its own."""
LABEL, PAIR = 0.03, 0.01
"""Chance that a given label, or pair of labels, is a cause."""
MOST_CAUSES = 200
"""Only that many of the best explanations are considered."""
NEGLIGIBLE = 0.003
"""Share of all hypotheses below which a cause is not asked about candidates."""


class Part(NamedTuple):
    """A label, or a number and all above it."""

    axis: str
    label: str

    def holds(self, label: str) -> bool:
        """Whether a candidate with this label on the axis has it."""
        own, limit = number(label), number(self.label)
        return label == self.label or (own is not None and limit is not None and own >= limit)


class Causes(NamedTuple):
    """What may be behind failures; arrays over the causes."""

    first: npt.NDArray[np.intp]
    """Place of a part."""
    second: npt.NDArray[np.intp]
    """That of another axis which a candidate has to have as well; the same again where one is enough."""
    explains: Mask
    """Which failures each would be the cause of, shape (causes, failures)."""

    @property
    def prior(self) -> Array:
        """Chance of each."""
        return np.where(self.first == self.second, LABEL, PAIR)

    def only(self, places: npt.NDArray[np.intp]) -> Causes:
        """Some of them."""
        return Causes(self.first[places], self.second[places], self.explains[places])


def success_chance(pool: Pool, observations: Sequence[Observation]) -> Array:
    """Chance that each candidate runs."""
    chance = (1.0 - ALONE) * pool.success
    failed = [o.item for o in observations if o.measured is None]
    if not failed:
        return chance
    parts = _parts(pool.axes, failed)
    causes = _causes(parts, failed, [o.item for o in observations if o.measured is not None])
    alone = np.array([1.0 - (1.0 - ALONE) * item.success for item in failed])
    better = np.argsort(-(np.log(causes.prior) - causes.explains @ np.log(alone)), kind="stable")
    causes = causes.only(better[:MOST_CAUSES])
    weight = _weights(causes, alone)
    kept = np.flatnonzero(weight.sum(axis=1)[1:] >= NEGLIGIBLE)
    weight = weight[np.ix_([0, *(kept + 1)], [0, *(kept + 1)])]
    spared = np.ones((len(kept) + 1, len(pool.items)))
    for row, place in enumerate(kept, start=1):
        has = _has(pool, parts[causes.first[place]]) & _has(pool, parts[causes.second[place]])
        spared[row, has] = 0.0
    return np.asarray(chance * np.einsum("ij,ij->j", spared, (weight / weight.sum()) @ spared))


def _parts(axes: Sequence[str], failed: Sequence[PoolItem]) -> list[Part]:
    return sorted({Part(axis, item.choices.get(axis, "")) for axis in axes for item in failed})


def _causes(parts: Sequence[Part], failed: Sequence[PoolItem], ran: Sequence[PoolItem]) -> Causes:
    """What something that failed has and nothing that ran."""
    in_failed, in_ran = (
        np.array(
            [[part.holds(item.choices.get(part.axis, "")) for item in items] for part in parts], dtype=float
        )
        for items in (failed, ran)
    )
    axes = np.array([part.axis for part in parts])
    other_axis = (axes[:, None] != axes[None, :]) | np.eye(len(parts), dtype=bool)
    together = (in_failed @ in_failed.T > 0.0) & other_axis
    if ran:
        together &= in_ran @ in_ran.T == 0.0
    first, second = np.nonzero(np.triu(together))
    return Causes(first, second, (in_failed[first] * in_failed[second]) > 0.0)


def _weights(causes: Causes, alone: Array) -> Array:
    """How likely every two causes are to be all that there are; the first row and column are for no cause.

    ``alone`` is for every failure how likely it was without a common cause.
    """
    left_out = np.vstack([np.ones(len(alone)), ~causes.explains])
    prior = np.concatenate([[1.0], causes.prior])
    log_alone = (left_out * np.log(alone)) @ left_out.T
    weight = np.outer(prior, prior) * np.exp(log_alone - log_alone.max())
    weight[0, 0] *= 2.0  # all others are there twice
    np.fill_diagonal(weight[1:, 1:], 0.0)
    return np.asarray(weight / weight.sum())


def _has(pool: Pool, part: Part) -> Mask:
    """Which candidates have it."""
    place = pool.axes.index(part.axis)
    holds = np.array([part.holds(label) for label in pool.labels[place]], dtype=bool)
    return np.asarray(holds[pool.codes[place]])
