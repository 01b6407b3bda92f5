"""No configuration that runs is rejected, and nearly all that cannot are: over every measured row and card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h200 import Row, rows
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.estimate import estimate_memory
from titan_tune.units import GIB

SMALLEST, LARGEST = 16.0, 141.0
"""GiB, as are all sizes here."""
STEP = 0.5
# with a fake process group NCCL's memory is missing from what was measured
ROWS = [row for row in rows() if row.device_gib and not row.is_fake]
CARDS = [SMALLEST + STEP * n for n in range(int((LARGEST - SMALLEST) / STEP) + 1)]


def need(row: Row) -> float:
    """The least card on which the run fits: active memory and what lay outside the allocator."""
    both = zip(row.active_gib, row.device_gib, row.reserved_gib, strict=True)
    return max(active + device - reserved for active, device, reserved in both)


def on_card(row: Row, capacity: float) -> MemoryEstimate:
    gpu = row.settings.cluster.gpu.model_copy(update={"memory_gib": capacity})
    cluster = row.settings.cluster.model_copy(update={"gpu": gpu})
    return estimate_memory(replace(row.settings, cluster=cluster))


def rejects(row: Row, capacity: float) -> bool:
    return on_card(row, capacity).verdict is Verdict.DOES_NOT_FIT


@given(st.sampled_from(ROWS), st.floats(SMALLEST, LARGEST))
def test_what_ran_within_a_card_is_never_rejected(row: Row, capacity: float) -> None:
    if need(row) <= capacity:
        assert not rejects(row, capacity)


@pytest.mark.parametrize("row", [row for row in ROWS if need(row) >= SMALLEST], ids=lambda row: row.id)
def test_not_even_on_a_card_that_is_exactly_full(row: Row) -> None:
    assert not rejects(row, need(row))
    assert not rejects(row, max(row.device_gib))


def test_nearly_all_that_need_more_are_rejected() -> None:
    lacking = [(row, capacity) for row in ROWS for capacity in CARDS if need(row) > capacity]
    rejected = sum(rejects(row, capacity) for row, capacity in lacking)
    assert len(lacking) > 1000
    assert rejected >= 0.95 * len(lacking)


@given(st.sampled_from(ROWS), st.floats(SMALLEST, LARGEST), st.floats(0.0, 50.0))
def test_a_larger_card_never_has_a_worse_verdict(row: Row, capacity: float, more: float) -> None:
    order = [Verdict.DOES_NOT_FIT, Verdict.PRESSURE, Verdict.FITS]
    before, after = on_card(row, capacity).verdict, on_card(row, capacity + more).verdict
    assert order.index(before) <= order.index(after)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_is_said_to_fit_has_room_for_what_was_used(row: Row) -> None:
    """At the smallest card that ``fits``, device memory as measured is at most 5 % more than the card."""
    estimate = on_card(row, LARGEST)
    fits_from = max(estimate.active_interval[1], estimate.reserved_bytes) + estimate.outside_bytes
    assert on_card(row, fits_from / GIB).verdict is Verdict.FITS
    assert max(row.device_gib) <= 1.05 * fits_from / GIB
