"""What probes teach: the correction of a prediction, as a Gaussian process over what candidates have in common.

The correction is the logarithm of measured over predicted: an offset that all candidates share, effects
(``study.pool``) and the noise of a probe. Pure functions of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titan_tune.study.pool import Array


class Prior(NamedTuple):
    """What is known of a log correction before any probe."""

    offset: float
    """Standard deviation of what all candidates share: differs between machines."""
    scale: float
    """Of the effects, as a multiple of the ``SD_*`` above."""
    noise: float
    """Standard deviation between probes of one configuration, beyond what their steps tell."""


SCALES = (0.5, 1.5, 4.0)
"""A model that knows this machine, an average one, one that does not."""
SPEED = tuple(Prior(offset=0.3, scale=scale, noise=0.006) for scale in SCALES)
"""Of log(measured / predicted tokens/s); priors of equal weight."""
UNSCALED = Prior(offset=30.0, scale=4.0, noise=0.006)
"""Likewise where the prediction has no scale: 1 for every candidate of a model that no formula covers."""
DURATION = Prior(offset=0.4, scale=6.0, noise=0.15)
"""Of log(measured / guessed seconds of a probe)."""


class Seen(NamedTuple):
    """What probes measured; arrays over the probes."""

    among: Array
    """Their effects' covariances, square."""
    log_ratios: Array
    """log(measured / predicted)."""
    noise: Array
    """Standard error of each."""

    def covariance(self, prior: Prior) -> Array:
        """Of ``log_ratios``, before they were seen."""
        noise = np.diag(self.noise**2 + prior.noise**2)
        return np.asarray(prior.offset**2 + prior.scale**2 * self.among + noise)


class Posterior(NamedTuple):
    """Mean and standard deviation of the log correction, and the log likelihood of what was seen."""

    mean: Array
    sd: Array
    log_likelihood: float


def posterior(cross: Array, variance: float, seen: Seen, prior: Prior) -> Posterior:
    """Of the log correction of candidates.

    ``cross`` are the effects' covariances of the probes with the candidates, shape (probes, candidates), ``variance``
    that of any candidate.
    """
    variance = prior.offset**2 + prior.scale**2 * variance
    if not len(seen.log_ratios):
        candidates = cross.shape[1]
        return Posterior(np.zeros(candidates), np.full(candidates, math.sqrt(variance)), 0.0)
    factor = np.linalg.cholesky(seen.covariance(prior))
    whitener = np.linalg.inv(factor)
    residual = whitener @ seen.log_ratios
    # whitener @ (offset² + scale² cross), without building the sum
    explained = (prior.scale**2 * whitener) @ cross + prior.offset**2 * whitener.sum(axis=1, keepdims=True)
    left = np.maximum(variance - np.einsum("ij,ij->j", explained, explained), 1e-12)
    log_likelihood = -0.5 * float(residual @ residual) - float(np.log(np.diag(factor)).sum())
    return Posterior(residual @ explained, np.sqrt(left), log_likelihood)


def posterior_mean(cross: Array, seen: Seen, prior: Prior) -> Array:
    """:func:`posterior`'s mean alone."""
    if not len(seen.log_ratios):
        return np.zeros(cross.shape[1])
    weights = np.linalg.solve(seen.covariance(prior), seen.log_ratios)
    return np.asarray(prior.scale**2 * (weights @ cross) + prior.offset**2 * weights.sum())


def averaged(parts: Sequence[Posterior]) -> Posterior:
    """The normal distribution with the mean and variance of their mixture, each weighed by its likelihood."""
    logs = np.array([part.log_likelihood for part in parts])
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    means, sds = np.array([part.mean for part in parts]), np.array([part.sd for part in parts])
    mean = weights @ means
    variance = weights @ (sds**2 + (means - mean) ** 2)
    return Posterior(mean, np.sqrt(variance), float(logs.max() + np.log(weights.mean())))


def speed_correction(cross: Array, variance: float, seen: Seen) -> Posterior:
    """Of log(measured / predicted tokens/s); see :func:`posterior`."""
    priors = (*SPEED, UNSCALED) if len(seen.log_ratios) else SPEED
    return averaged([posterior(cross, variance, seen, prior) for prior in priors])
