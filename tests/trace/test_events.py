from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan_tune.trace.events import (
    STEP_PHASE,
    Allocate,
    Event,
    Free,
    Mark,
    components_at,
    curve,
    last_step,
    phase_peaks,
    rounded,
    timeline,
)

STEP: list[Event] = [
    Allocate(1, 1024, 0, "parameters"),
    Mark(STEP_PHASE),
    Mark("forward"),
    Allocate(2, 2048, 0, "activations"),
    Allocate(3, 100, 0, "other"),
    Mark("loss_backward"),
    Free(3),
    Allocate(4, 4096, 0, "logits_loss"),
    Free(4),
    Free(2),
]


def test_rounded() -> None:
    assert [rounded(n) for n in (0, 1, 512, 513)] == [512, 512, 512, 1024]


def test_curve_counts_rounded_bytes() -> None:
    assert [point.active_bytes for point in curve(STEP)] == [
        1024, 1024, 1024, 3072, 3584, 3584, 3072, 7168, 3072, 1024,
    ]  # fmt: skip


def test_phase_peaks() -> None:
    peaks = phase_peaks(STEP, first=last_step(STEP))
    assert {name: p.active_bytes for name, p in peaks.items()} == {
        STEP_PHASE: 1024,
        "forward": 3584,
        "loss_backward": 7168,
    }
    assert components_at(STEP, peaks["loss_backward"].event) == {
        "parameters": 1024,
        "activations": 2048,
        "logits_loss": 4096,
    }


def test_last_step_is_the_second_of_two() -> None:
    assert last_step([*STEP, *STEP]) == len(STEP) + 1
    assert last_step(STEP[2:]) == 0


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=300), st.integers(4, 50))
def test_timeline_is_short_and_keeps_the_peak(sizes: list[int], points: int) -> None:
    events: list[Event] = []
    for block, size in enumerate(sizes):
        events += [Allocate(block, size, 0, "other")]
        if block % 3:
            events.append(Free(block))
    thin = timeline(events, points=points)
    assert len(thin) <= points + 2
    assert max(p.active_bytes for p in thin) == max(p.active_bytes for p in curve(events))
    assert list(thin) == sorted(thin)
