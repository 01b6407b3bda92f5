"""How alike two labels of an axis are, from their spelling: what a probe of one says about the other.

A kernel, 1 for equal labels: a share for the label itself, a share for being on or off (``none`` and ``off`` against
all else), and a share for numbers that lie close (local batches) or parts in common (``dp_shard=2,tp=2`` and
``dp_shard=4,tp=2``; ``tensorwise`` and ``tensorwise-fsdp_all_gather``). Each share is a covariance, so their sum is.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

OFF_LABELS = frozenset({"off", "none", "false", "0"})
OWN, SWITCH, LIKENESS = 0.5, 0.2, 0.3
DOUBLINGS = 1.5
"""Factors of two over which the likeness of numbers falls to 1/e."""


@lru_cache(maxsize=100_000)
def label_similarity(a: str, b: str) -> float:
    """From 0 (nothing in common) to 1 (equal)."""
    if a == b:
        return 1.0
    switch = SWITCH * ((a in OFF_LABELS) == (b in OFF_LABELS))
    return switch + LIKENESS * _likeness(a, b)


def _likeness(a: str, b: str) -> float:
    first, second = number(a), number(b)
    if first is not None and second is not None:
        return math.exp(-abs(math.log2(first / second)) / DOUBLINGS)
    if first is not None or second is not None:
        return 0.0
    parts, others = _parts(a), _parts(b)
    return len(parts & others) / math.sqrt(len(parts) * len(others))


@lru_cache(maxsize=10_000)
def number(label: str) -> float | None:
    """The positive number that a label is, if any."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if 0.0 < value < math.inf else None


@lru_cache(maxsize=10_000)
def _parts(label: str) -> frozenset[str]:
    parts = re.split(r"[^\w=.]+", label)
    return frozenset(parts) | {part.partition("=")[0] for part in parts}
