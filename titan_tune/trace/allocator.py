"""A model of PyTorch's CUDA caching allocator: events of one rank → reserved bytes. No torch here.

Follows c10/cuda/CUDACachingAllocator.cpp (torch 2.11): one small and one large pool per stream, best fit,
splitting and merging; ``cudaMalloc`` segments, or ``expandable_segments:True``. Not modelled: a full
card (nothing is given back to the driver), ``record_stream``, and ``PYTORCH_ALLOC_CONF`` keys other
than ``expandable_segments``.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from titan_tune.trace.events import STEP_PHASE, Allocate, Event, Free, rounded

AllocatorMode = Literal["expandable", "classic"]

SMALL_REQUEST: Final = 1 << 20
"""kSmallSize: requests up to here live in the small pool; also the least remainder split off a segment."""
SMALL_SEGMENT: Final = 2 << 20
"""kSmallBuffer: a segment of the small pool, and the page of its expandable segment."""
LARGE_SEGMENT: Final = 20 << 20
"""kLargeBuffer: a segment for requests below kMinLargeAlloc, and the page of an expandable segment."""
MIN_LARGE_REQUEST: Final = 10 << 20
"""kMinLargeAlloc."""
ROUND_LARGE: Final = 2 << 20
"""kRoundLarge: larger segments are multiples of it."""
MIN_SPLIT: Final = 512
"""Least remainder split off in the small pool and in expandable segments."""
ADDRESS_SPACE: Final = 1 << 42
"""Addresses between two segments; an expandable segment may grow through all of them."""


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment; neighbours are linked in address order."""

    address: int
    size: int
    free: bool = True
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def can_grow_to(self) -> int:
        """Size together with unmapped addresses right behind."""
        return self.size + (self.after.size if self.after is not None and not self.after.mapped else 0)


class _FreeList:
    """Free blocks of one pool by (size, address)."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        bisect.insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self._keys[bisect.bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def best_fit(self, size: int, *, expandable: bool) -> _Block | None:
        index = bisect.bisect_left(self._keys, (size, -1))
        if index == len(self._keys):
            return None
        best = self._blocks[self._keys[index][1]]
        if expandable:
            # the block before unmapped addresses counts with them, so that it is taken last
            for _, address in self._keys[index + 1 :]:
                other = self._blocks[address]
                if other.can_grow_to >= best.can_grow_to:
                    break
                best = other
        return best


class _Pool:
    """The small or the large blocks of one stream."""

    def __init__(self, *, small: bool, expandable: bool, first_address: int) -> None:
        self.expandable = expandable
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.min_split = MIN_SPLIT if small or expandable else SMALL_REQUEST + 1
        self.reserved = 0
        self._small = small
        self._next_address = first_address
        self._free = _FreeList()
        self._unmapped: list[_Block] = []

    def allocate(self, size: int) -> _Block:
        """A block of ``size`` bytes, from the free list or from new memory."""
        block = self._free.best_fit(size, expandable=self.expandable)
        if block is not None:
            self._free.remove(block)
        else:
            block = self._grown(size) if self.expandable else self._segment(size)
        if block.size - size >= self.min_split:
            rest = self._cut(block, size)
            self._free.add(rest)
        block.free = False
        return block

    def release(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        block.free = True
        self._merge_neighbours(block)
        self._free.add(block)

    def _segment(self, size: int) -> _Block:
        if self._small:
            length = SMALL_SEGMENT
        elif size < MIN_LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += length
        self._next_address += ADDRESS_SPACE
        return _Block(self._next_address, length)

    def _grown(self, size: int) -> _Block:
        """Map pages of an expandable segment until a block of ``size`` is there."""
        block = self._expandable_block(size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            unmapped = block.after
            assert unmapped is not None
            self._map(unmapped, min(size - block.size, unmapped.size))
            block = unmapped
        self._free.remove(block)
        return block

    def _expandable_block(self, size: int) -> _Block:
        for block in self._unmapped:
            first = block.before if block.before is not None and block.before.free else block
            room, at = 0, first
            while at is not None and at.free and room < size:
                room += at.size
                at = at.after  # type: ignore[assignment]
            if room >= size:
                return first
        self._next_address += ADDRESS_SPACE
        fresh = _Block(self._next_address, ADDRESS_SPACE, mapped=False)
        self._unmapped.append(fresh)
        return fresh

    def _map(self, block: _Block, size: int) -> None:
        length = min(block.size, -(-size // self.page) * self.page)
        self._unmapped.remove(block)
        block.mapped = True
        if length < block.size:
            rest = self._cut(block, length)
            rest.mapped = False
            bisect.insort(self._unmapped, rest, key=lambda b: b.address)
        self.reserved += length
        self._merge_neighbours(block)
        self._free.add(block)

    @staticmethod
    def _cut(block: _Block, size: int) -> _Block:
        """Shorten a block; returns the rest, linked behind it."""
        rest = _Block(block.address + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        return rest

    def _merge_neighbours(self, block: _Block) -> None:
        for other in (block.before, block.after):
            if other is None or not other.free or other.mapped != block.mapped:
                continue
            self._free.remove(other)
            block.size += other.size
            if other is block.before:
                block.address = other.address
                block.before = other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block


class CachingAllocator:
    """The allocator of one device. Bytes throughout."""

    def __init__(self, mode: AllocatorMode = "expandable") -> None:
        self.mode = mode
        self.reserved = 0
        self.allocated = 0
        self.peak_reserved = 0
        self.peak_allocated = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, tuple[_Block, _Pool]] = {}

    def allocate(self, block: int, num_bytes: int, stream: int = 0) -> None:
        """``malloc`` of ``num_bytes`` under the caller's number ``block``."""
        size = rounded(num_bytes)
        pool = self._pool(stream, small=size <= SMALL_REQUEST)
        before = pool.reserved
        held = pool.allocate(size)
        self._held[block] = (held, pool)
        self.reserved += pool.reserved - before
        self.allocated += held.size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, block: int) -> None:
        """``free``; a number that is not held is ignored (it was allocated before the trace began)."""
        held = self._held.pop(block, None)
        if held is not None:
            self.allocated -= held[0].size
            held[1].release(held[0])

    def reset_peaks(self) -> None:
        """``reset_peak_memory_stats``."""
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated

    def reserved_by_stream(self) -> dict[int, int]:
        """Reserved bytes of each stream's pools."""
        totals: dict[int, int] = {}
        for (stream, _), pool in self._pools.items():
            totals[stream] = totals.get(stream, 0) + pool.reserved
        return totals

    def _pool(self, stream: int, *, small: bool) -> _Pool:
        key = (stream, small)
        if key not in self._pools:
            self._pools[key] = _Pool(
                small=small, expandable=self.mode == "expandable", first_address=len(self._pools) * 2**60
            )
        return self._pools[key]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peaks of one training step, bytes."""

    reserved_bytes: int
    active_bytes: int


def replay(events: Iterable[Event], mode: AllocatorMode = "expandable") -> tuple[StepMemory, ...]:
    """Peaks of every training step in the events. The allocator keeps what it reserved between steps."""
    allocator = CachingAllocator(mode)
    steps: list[StepMemory] = []
    started = False
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.block, event.num_bytes, event.stream)
        elif isinstance(event, Free):
            allocator.free(event.block)
        elif event.phase == STEP_PHASE:
            if started:
                steps.append(StepMemory(allocator.peak_reserved, allocator.peak_allocated))
            started = True
            allocator.reset_peaks()
    return (*steps, StepMemory(allocator.peak_reserved, allocator.peak_allocated))
