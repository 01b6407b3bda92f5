"""The memory formula against the exhaustive H200 tables, which were compared after it was written."""

from __future__ import annotations

import pytest
from h200 import TableRow, table_rows

from titan_tune.domain.settings import AcMode, Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.reserved import uses_cuda_graphs

ROWS = table_rows()


def is_exact(settings: Settings) -> bool:
    """Not what the margins name: split blocks, compiled rings, CUDA graphs with accumulation, pipelines."""
    dims, graphs = settings.dims, uses_cuda_graphs(settings)
    compiled_whole = settings.compile.model and settings.ac.mode is AcMode.NONE
    return not (
        dims.pp > 1
        or (graphs and settings.gradient_accumulation_steps > 1)
        or (compiled_whole and (dims.cp > 1 or dims.dp_replicate > 1))
    )


EXACT = [row for row in ROWS if is_exact(row.settings)]


def name(row: TableRow) -> str:
    return f"{row.table}: {row.choices}"


def test_there_are_tables() -> None:
    assert len({row.table for row in ROWS}) == 3 and len(ROWS) >= 120
    assert len(EXACT) >= 90


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_worst_rank_lies_in_the_interval(row: TableRow) -> None:
    low, high = estimate_memory(row.settings).active_interval
    assert low <= max(row.active_bytes) <= high


@pytest.mark.parametrize("row", EXACT, ids=name)
def test_most_rows_are_exact(row: TableRow) -> None:
    assert estimate_memory(row.settings).active_bytes == pytest.approx(max(row.active_bytes), rel=0.0015)
