"""The formulas against every measured H200 row."""

from __future__ import annotations

import statistics

import pytest
from h200 import Row, rows

from titan_tune.domain.estimate import Verdict
from titan_tune.estimate import estimate_memory, estimate_step_time
from titan_tune.units import GIB

ROWS = rows()
PIPELINE = [row for row in ROWS if row.settings.dims.pp > 1]
OTHERS = [row for row in ROWS if row.settings.dims.pp == 1]


def relative_errors(row: Row, measured: tuple[float, ...], attribute: str) -> list[float]:
    """Of each pipeline rank, or of the one figure that all ranks share."""
    stages = estimate_memory(row.settings).stages
    return [
        getattr(stage, attribute) / GIB / value - 1
        for stage, value in zip(stages, measured[: len(stages)], strict=True)
    ]


def test_all_rows_are_there() -> None:
    assert len(ROWS) == 57
    assert len(PIPELINE) == 2


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.id)
def test_active_memory(row: Row) -> None:
    (error,) = relative_errors(row, row.active_gib, "active_bytes")
    assert abs(error) <= 0.01


def test_active_memory_on_average() -> None:
    errors = [abs(e) for row in OTHERS for e in relative_errors(row, row.active_gib, "active_bytes")]
    assert statistics.mean(errors) <= 0.0005
    assert sum(error <= 0.001 for error in errors) >= len(errors) - 1


@pytest.mark.parametrize("row", PIPELINE, ids=lambda row: row.id)
def test_active_memory_of_pipeline_ranks(row: Row) -> None:
    assert all(abs(e) <= 0.01 for e in relative_errors(row, row.active_gib, "active_bytes"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_measured_active_memory_lies_in_the_interval(row: Row) -> None:
    low, high = estimate_memory(row.settings).active_interval
    assert low <= max(row.active_gib) * GIB <= high


def test_reserved_memory() -> None:
    errors = [abs(e) for row in ROWS for e in relative_errors(row, row.reserved_gib, "reserved_bytes")]
    assert statistics.mean(errors) <= 0.015
    assert max(errors) <= 0.065


@pytest.mark.parametrize("row", [row for row in ROWS if not row.is_fake], ids=lambda row: row.id)
def test_memory_outside_the_allocator(row: Row) -> None:
    outside = max(d - r for d, r in zip(row.device_gib, row.reserved_gib, strict=True))
    assert estimate_memory(row.settings).outside_bytes / GIB == pytest.approx(outside, abs=0.05)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_ran_is_said_to_fit(row: Row) -> None:
    assert estimate_memory(row.settings).verdict is Verdict.FITS


def test_step_time_orders_and_predicts() -> None:
    ratios = []
    for row in ROWS:
        estimate = estimate_step_time(row.settings)
        silent = estimate.components["communication"] if row.is_fake else 0.0
        predicted = estimate.tokens_per_second_per_gpu * estimate.seconds / (estimate.seconds - silent)
        ratios.append(predicted / row.tokens_per_second)
    assert statistics.median(abs(ratio - 1) for ratio in ratios) <= 0.02
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios)
