from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.trace.events import STEP_PHASE, Allocate, Event, Free, Mark
from titan_tune.trace.extrapolate import LAYERS_APART, Depth, depths, extrapolated

KIB = 1024


def step(layers: int, *, state: int, saved: int, gradient: int, scratch: int, loss: int) -> list[Event]:
    """A training step of ``layers`` identical layers, sizes in KiB (512 B each is the allocator's unit)."""
    events: list[Event] = [Allocate(0, layers * state * KIB, 0, "parameters"), Mark(STEP_PHASE)]
    events.append(Mark("forward"))
    events += [Allocate(100 + i, saved * KIB, 0, "activations") for i in range(layers)]
    events += [Mark("loss_backward"), Allocate(1, loss * KIB, 0, "logits_loss"), Free(1)]
    for layer in reversed(range(layers)):
        events += [
            Mark(f"backward.{layer}"),
            Allocate(2, scratch * KIB, 0, "activations"),
            Allocate(1000 + layer, gradient * KIB, 0, "gradients"),
            Free(2),
            Free(100 + layer),
        ]
    return events


sizes = st.integers(1, 500)


@given(sizes, sizes, sizes, sizes, sizes, st.integers(2 * LAYERS_APART, 8), st.integers(1, 60))
def test_extrapolation_is_the_deep_trace(
    state: int, saved: int, gradient: int, scratch: int, loss: int, shallow: int, more: int
) -> None:
    shape = {"state": state, "saved": saved, "gradient": gradient, "scratch": scratch, "loss": loss}
    full = shallow + 1 + more
    traces = [Depth(n, step(n, **shape)) for n in (shallow, shallow + 1)]
    deep = extrapolated([Depth(full, step(full, **shape))], full)
    made = extrapolated(traces, full)
    assert made.active_bytes == deep.active_bytes == sum(made.components.values())
    assert made.phases["backward"] == deep.phases["backward"]
    assert made.phase == deep.phase


def test_one_trace_is_taken_as_it_is() -> None:
    events = step(3, state=1, saved=10, gradient=2, scratch=5, loss=100)
    peak = extrapolated([Depth(3, events)], 3)
    assert peak.phase == "loss_backward"
    assert peak.components == {"parameters": 3 * KIB, "activations": 30 * KIB, "logits_loss": 100 * KIB}
    assert list(peak.phases) == [STEP_PHASE, "forward", "loss_backward", "backward"]


@pytest.mark.parametrize(
    ("full", "layers", "period", "special", "expected"),
    [
        (32, None, 1, 0, [32]),
        (32, 2, 1, 0, [4, 5]),
        (32, 6, 1, 0, [6, 7]),
        (32, 2, 4, 0, [4, 8]),  # every fourth layer differs
        (30, 2, 4, 0, [6, 10]),  # 30 = 6 + 6 periods
        (32, 2, 0, 0, [32]),  # a pipeline
        (27, 2, 1, 1, [5, 6]),  # one dense layer in front of the experts
        (5, 2, 1, 0, [5]),  # nothing to save
    ],
)
def test_depths(full: int, layers: int | None, period: int, special: int, expected: list[int]) -> None:
    assert depths(full, layers, period=period, special=special) == expected
