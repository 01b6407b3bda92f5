from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.trace.allocator import CachingAllocator, replay
from titan_tune.trace.events import STEP_PHASE, Allocate, Event, Free, Mark

MIB = 1 << 20


def alloc(block: int, mib: float, stream: int = 0) -> Allocate:
    return Allocate(block, int(mib * MIB), stream, "other")


def peaks(events: list[Event], mode: str) -> tuple[float, float]:
    (step,) = replay(events, mode)  # type: ignore[arg-type]
    return step.reserved_bytes / MIB, step.active_bytes / MIB


@pytest.mark.parametrize(
    ("mib", "classic", "expandable"),
    [
        (0.25, 2, 2),  # small pool
        (1, 2, 2),  # still small: the limit is inclusive
        (1.5, 20, 20),  # below 10 MiB: a 20 MiB segment
        (10, 10, 20),  # from 10 MiB on: its own segment, in units of 2 MiB
        (11, 12, 20),
        (21, 22, 40),
    ],
)
def test_first_allocation_reserves_a_segment(mib: float, classic: float, expandable: float) -> None:
    assert peaks([alloc(1, mib)], "classic")[0] == classic
    assert peaks([alloc(1, mib)], "expandable")[0] == expandable


def test_request_is_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 1)
    assert allocator.allocated == 512


@pytest.mark.parametrize("mode", ["classic", "expandable"])
def test_freed_memory_is_used_again(mode: str) -> None:
    events = [alloc(1, 40), Free(1), alloc(2, 40)]
    assert peaks(events, mode) == (40, 40)


def test_classic_segments_do_not_grow() -> None:
    # 40 MiB were freed in two segments of 20; a block of 40 fits in neither
    events = [alloc(1, 20), alloc(2, 20), Free(1), Free(2), alloc(3, 40)]
    assert peaks(events, "classic") == (80, 40)
    assert peaks(events, "expandable") == (40, 40)


def test_expandable_segment_fills_its_hole_only_if_it_fits() -> None:
    # the hole of 20 MiB in front of block 2 is too small for 40; the segment grows behind it
    events = [alloc(1, 20), alloc(2, 20), Free(1), alloc(3, 40)]
    assert peaks(events, "expandable") == (80, 60)


def test_expandable_segment_extends_a_free_tail() -> None:
    # the last block was freed: 20 MiB are mapped and 20 more follow
    events = [alloc(1, 20), alloc(2, 20), Free(2), alloc(3, 40)]
    assert peaks(events, "expandable") == (60, 60)


def test_streams_do_not_share() -> None:
    events = [alloc(1, 40), Free(1), alloc(2, 40, stream=1)]
    assert peaks(events, "expandable") == (80, 40)
    allocator = CachingAllocator()
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.block, event.num_bytes, event.stream)
        elif isinstance(event, Free):
            allocator.free(event.block)
    assert allocator.reserved_by_stream() == {0: 40 * MIB, 1: 40 * MIB}


def test_best_fit_takes_the_smallest_hole() -> None:
    # holes of 60 and 40 MiB; 40 goes into the second, so that 60 still fits
    events = [
        alloc(1, 60),
        alloc(2, 20),
        alloc(3, 40),
        alloc(4, 20),
        Free(1),
        Free(3),
        alloc(5, 40),
        alloc(6, 60),
    ]
    assert peaks(events, "expandable") == (140, 140)
    assert peaks(events, "classic") == (140, 140)


def test_classic_keeps_small_remainders() -> None:
    # 1 MiB left of a large segment is not split off, 2 MiB are
    held = CachingAllocator("classic")
    held.allocate(1, 19 * MIB)
    held.free(1)
    assert held.reserved == 20 * MIB
    held.allocate(2, int(19.5 * MIB))
    assert held.allocated == 20 * MIB
    held.free(2)
    held.allocate(3, 18 * MIB)
    assert held.allocated == 18 * MIB


def test_step_peaks_start_from_what_is_reserved() -> None:
    events = [Mark(STEP_PHASE), alloc(1, 60), Free(1), Mark(STEP_PHASE), alloc(2, 20), Free(2)]
    first, second = replay(events)
    assert first.reserved_bytes == second.reserved_bytes == 60 * MIB
    assert second.active_bytes == 20 * MIB


def test_unknown_block_is_ignored() -> None:
    allocator = CachingAllocator()
    allocator.free(7)
    assert allocator.allocated == 0


Step = tuple[int, int, int]


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    """Allocations of any size on two streams, some freed, in any order."""
    events: list[Event] = []
    live: list[int] = []
    for block in range(draw(st.integers(1, 60))):
        size = draw(st.one_of(st.integers(1, MIB), st.integers(MIB, 64 * MIB)))
        events.append(Allocate(block, size, draw(st.integers(0, 1)), "other"))
        live.append(block)
        while live and draw(st.booleans()):
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


@given(traces(), st.sampled_from(["classic", "expandable"]))
def test_reserved_holds_active_and_replay_repeats(events: list[Event], mode: str) -> None:
    (step,) = replay(events, mode)  # type: ignore[arg-type]
    assert step.reserved_bytes >= step.active_bytes
    assert replay(events, mode) == (step,)  # type: ignore[arg-type]


@given(traces())
def test_everything_freed_leaves_nothing_allocated(events: list[Event]) -> None:
    allocator = CachingAllocator()
    live = set()
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.block, event.num_bytes, event.stream)
            live.add(event.block)
        elif isinstance(event, Free):
            allocator.free(event.block)
            live.discard(event.block)
    reserved = allocator.reserved
    for block in live:
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.reserved == reserved


@given(traces())
def test_expandable_memory_is_whole_again_once_free(events: list[Event]) -> None:
    allocator = CachingAllocator()
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.block, event.num_bytes, 0)
    for event in events:
        if isinstance(event, Allocate):
            allocator.free(event.block)
    reserved = allocator.reserved
    large = allocator._pools.get((0, False))
    if large is not None:
        # one block of all that was mapped needs no new memory
        allocator.allocate(-1, large.reserved)
        assert allocator.reserved == reserved
