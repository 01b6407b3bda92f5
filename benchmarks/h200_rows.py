"""The measured H200 rows for the benchmarks: the same helper that the tests use."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "estimate"))

import h200  # noqa: E402
from h200 import Row, rows  # noqa: E402

__all__ = ["ROOT", "Row", "layout_rows", "rows"]


def layout_rows() -> tuple[Row, ...]:
    """One rank of larger jobs and other models; only the allocator's peaks were recorded."""
    return tuple(
        Row(
            id=row.id,
            settings=row.settings,
            active_gib=(row.active_gib,),
            reserved_gib=(row.reserved_gib,),
            device_gib=(),
            tokens_per_second=0.0,
            is_fake=True,
        )
        for row in h200.layout_rows()
    )
