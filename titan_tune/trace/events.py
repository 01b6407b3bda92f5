"""What a trace records, and what can be read off it without a model of the allocator. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

ROUND_BYTES: Final = 512
"""kMinBlockSize of PyTorch's caching allocator: every allocation is a multiple of it."""

STEP_PHASE: Final = "zero_grad"
"""The mark that begins a training step."""


class Allocate(NamedTuple):
    """A storage of ``num_bytes`` comes to life on a stream."""

    block: int
    num_bytes: int
    stream: int
    component: str


class Free(NamedTuple):
    """The storage of that number dies."""

    block: int


class Mark(NamedTuple):
    """A phase of the step begins."""

    phase: str


Event = Allocate | Free | Mark


def rounded(num_bytes: int) -> int:
    """Bytes that the allocator hands out for a request."""
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


class Point(NamedTuple):
    """Active bytes after one event."""

    event: int
    phase: str
    active_bytes: int


def curve(events: Iterable[Event]) -> Iterator[Point]:
    """Active bytes after every event."""
    live: dict[int, int] = {}
    current, phase = 0, ""
    for index, event in enumerate(events):
        if isinstance(event, Allocate):
            size = live[event.block] = rounded(event.num_bytes)
            current += size
        elif isinstance(event, Free):
            current -= live.pop(event.block, 0)
        else:
            phase = event.phase
        yield Point(index, phase, current)


def components_at(events: Sequence[Event], index: int) -> dict[str, int]:
    """Active bytes by component after event ``index``."""
    live: dict[int, Allocate] = {}
    for event in events[: index + 1]:
        if isinstance(event, Allocate):
            live[event.block] = event
        elif isinstance(event, Free):
            live.pop(event.block, None)
    totals: dict[str, int] = {}
    for allocation in live.values():
        size = rounded(allocation.num_bytes)
        totals[allocation.component] = totals.get(allocation.component, 0) + size
    return totals


def last_step(events: Sequence[Event]) -> int:
    """Index of the mark that begins the last training step (0 where there is none)."""
    return max((i for i, e in enumerate(events) if isinstance(e, Mark) and e.phase == STEP_PHASE), default=0)


def phase_peaks(events: Sequence[Event], *, first: int = 0) -> dict[str, Point]:
    """The highest point of each phase at or after event ``first``, in the order of the phases."""
    best: dict[str, Point] = {}
    for point in curve(events):
        if point.event >= first and (
            point.phase not in best or point.active_bytes > best[point.phase].active_bytes
        ):
            best[point.phase] = point
    return best


def timeline(events: Iterable[Event], *, points: int) -> tuple[Point, ...]:
    """The curve thinned to at most ``points`` (and one bin more), each bin by its lowest and highest point."""
    full = list(curve(events))
    width = max(1, -(-2 * len(full) // points))
    kept: list[Point] = []
    for start in range(0, len(full), width):
        window = full[start : start + width]
        lowest = min(window, key=lambda point: point.active_bytes)
        highest = max(window, key=lambda point: point.active_bytes)
        kept.extend(sorted({lowest, highest}))
    return tuple(kept)
