"""A linear axis and its labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

PADDING = 0.06
"""Empty share of the range on both sides."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear axis from ``low`` to ``high``."""

    low: float
    high: float

    @classmethod
    def around(cls, *values: float, floor: float | None = None) -> Scale:
        """An axis that holds the values with some room; it starts at ``floor`` where one is given."""
        low, high = min(values), max(values)
        room = (high - low) * PADDING or abs(high) * PADDING or 1.0
        return cls(low - room if floor is None else floor, high + room)

    def share(self, value: float) -> float:
        """Where the value lies, 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 4) -> list[float]:
        """About ``count`` round numbers on the axis."""
        raw = (self.high - self.low) / count
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if size * m >= raw)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def compact(value: float) -> str:
    """A tick label."""
    if abs(value) >= 1000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"
