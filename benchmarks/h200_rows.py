"""The measured H200 rows for the benchmarks: the same helper that the tests use, and the dry runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "estimate"))

import h200  # noqa: E402
from dry_run_accuracy import dry_runs  # noqa: E402
from h200 import Row, TableRow, real_pair_rows, rows, table_rows  # noqa: E402

from titan_tune.units import GIB  # noqa: E402

__all__ = [
    "DRY_RUN",
    "ROOT",
    "DryRow",
    "Row",
    "TableRow",
    "dry_run_rows",
    "layout_rows",
    "real_pair_rows",
    "rows",
    "table_rows",
]

DRY_RUN = "dry-run:"
"""In front of the ids of dry runs, some of which are those of real runs."""


@dataclass(frozen=True)
class DryRow:
    """Ranks of a job that ran one at a time on one GPU."""

    row: Row
    """Its figures are those of ``ranks``, in order."""
    ranks: tuple[int, ...]
    real: str
    """Id of the real run of the same job, if there is one."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline rank of each: the pipeline is the outermost dimension of torchtitan's mesh."""
        dims = self.row.settings.dims
        return tuple(rank * dims.pp // dims.world_size for rank in self.ranks)

    @property
    def is_larger(self) -> bool:
        """Beyond the two GPUs of real runs."""
        return self.row.settings.dims.world_size > 2


def dry_run_rows() -> tuple[DryRow, ...]:
    """One rank of N on one GPU, or several one after the other; only the allocator's peaks were recorded."""
    return tuple(
        DryRow(
            row=Row(
                id=DRY_RUN + dry.row["id"],
                settings=dry.settings,
                active_gib=tuple(run.memory.active_bytes / GIB for run in dry.runs),
                reserved_gib=tuple(run.memory.reserved_bytes / GIB for run in dry.runs),
                device_gib=(),
                tokens_per_second=0.0,
                is_fake=True,
            ),
            ranks=tuple(run.rank for run in dry.runs),
            real=dry.row.get("real") or "",
        )
        for dry in dry_runs()
    )


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
