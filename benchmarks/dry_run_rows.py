"""The formula against every rank of the recorded dry runs.

    python benchmarks/dry_run_rows.py

Peaks of tests/data/h200_dry_runs.jsonl (one rank of N on one H200) beside the formula's for that pipeline rank.
"""

from __future__ import annotations

from dry_run_accuracy import dry_runs

from titan_tune.estimate import estimate_memory
from titan_tune.units import GIB


def main() -> None:
    """Print a line a rank."""
    for dry in dry_runs():
        estimate = estimate_memory(dry.settings)
        dims = dry.settings.dims
        for run in dry.runs:
            stage = estimate.stages[run.rank * dims.pp // dims.world_size]
            active, reserved = run.memory.active_bytes, run.memory.reserved_bytes
            print(
                f"{dry.row['id'][:44]:44} rank {run.rank:>3}"
                f"  active {active / GIB:7.3f} {100 * (stage.active_bytes / active - 1):+6.2f} %"
                f"  reserved {reserved / GIB:7.3f} {100 * (stage.reserved_bytes / reserved - 1):+6.2f} %"
            )


if __name__ == "__main__":
    main()
