"""The memory formula against the exhaustive H200 tables: a part of reports/memory_accuracy.md."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from h200_rows import TableRow, table_rows

from titan_tune.estimate import estimate_memory
from titan_tune.units import GIB

EXACT = 0.1
"""Percent."""


class Compared(NamedTuple):
    """One configuration of a table, GiB."""

    row: TableRow
    measured: tuple[float, ...]
    """Of every rank."""
    estimated: float
    """Of the worst rank."""
    interval: tuple[float, float]

    @property
    def error(self) -> float:
        """Percent, of the worst rank."""
        return 100 * (self.estimated / max(self.measured) - 1)


def compared(row: TableRow) -> Compared:
    """The formula beside it."""
    estimate = estimate_memory(row.settings)
    low, high = estimate.active_interval
    measured = tuple(size / GIB for size in row.active_bytes)
    return Compared(row, measured, estimate.active_bytes / GIB, (low / GIB, high / GIB))


def table_section() -> list[str]:
    """In words, and a line for each row that is off."""
    rows = [compared(row) for row in table_rows()]
    errors = [abs(row.error) for row in rows]
    inside = sum(row.interval[0] <= max(row.measured) <= row.interval[1] for row in rows)
    off = [row for row in rows if abs(row.error) > EXACT]
    tables = len({row.row.table for row in rows})
    return [
        "## Every configuration of the measured tables",
        "",
        f"{len(rows)} configurations of {tables} jobs (benchmarks/measure_table.py), worst rank. They were",
        "compared after the formula was written, and changed one term (eager float8 without AC) and three margins.",
        "",
        f"- active: median |error| {statistics.median(errors):.2f} %; {len(rows) - len(off)} within {EXACT} %",
        f"- measured active within the formula's interval: {inside} of {len(rows)}",
        "",
        "What is off: compiled blocks without AC under DDP, which torch.compile splits at DDP's buckets, and",
        "under CP, in part on one rank only, so that what the host runs ahead of the device may have a part in it;",
        "gradients that CUDA graphs hold between accumulation steps, which are reserved but not counted as active;",
        "messages of Interleaved1F1B.",
        "",
        "| table | configuration | active GiB by rank | formula | error % | interval |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.row.table} | {row.row.choices} | {', '.join(f'{gib:.2f}' for gib in row.measured)}"
            f" | {row.estimated:.2f} | {row.error:+.2f} | {row.interval[0]:.1f} to {row.interval[1]:.1f} |"
            for row in off
        ),
    ]
