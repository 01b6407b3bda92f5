"""Runs that others published: what holds whatever their allocator's mode was."""

from __future__ import annotations

import pytest

from benchmarks.public_rows import SINCE, Published, held, published
from titan_tune.domain.estimate import Verdict
from titan_tune.units import GIB

COVERED = [found for found in map(held, published()) if found.estimate is not None]
RAN = [found for found in COVERED if found.row["memory_gib"]]
OUT_OF_MEMORY = [found for found in COVERED if found.row["oom"]]


def name(found: Published) -> str:
    return str(found.row["id"])


def test_enough_rows_are_covered() -> None:
    assert len([found for found in RAN if found.row["date"] >= SINCE]) >= 11
    assert len(OUT_OF_MEMORY) >= 5


@pytest.mark.parametrize("found", RAN, ids=name)
def test_what_is_alive_is_no_more_than_what_was_reserved(found: Published) -> None:
    assert found.estimate is not None
    assert found.estimate.active_interval[0] / GIB <= found.row["memory_gib"]


@pytest.mark.parametrize("found", RAN, ids=name)
def test_what_ran_is_not_rejected(found: Published) -> None:
    assert found.estimate is not None
    assert found.estimate.verdict is not Verdict.DOES_NOT_FIT


@pytest.mark.parametrize("found", [f for f in RAN if f.row["pp"] == 1], ids=name)
def test_reserved_is_near_what_was_published(found: Published) -> None:
    assert abs(found.errors["formula"]) <= 16


@pytest.mark.parametrize("found", OUT_OF_MEMORY, ids=name)
def test_what_ran_out_of_memory_is_not_said_to_fit(found: Published) -> None:
    assert found.estimate is not None
    assert found.estimate.verdict is not Verdict.FITS
