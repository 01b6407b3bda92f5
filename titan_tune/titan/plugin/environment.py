"""The ``TITAN_TUNE_*`` environment variables: how a probe talks to the plug-in. Standard library only.

Without any of them the plug-in does what the file's ``[titan_tune]`` section says and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

METRICS_DIR: Final = "TITAN_TUNE_METRICS_DIR"
"""Folder for ``metrics.rank*.jsonl`` and ``error.rank*.json``."""
CACHE_DIR: Final = "TITAN_TUNE_CACHE_DIR"
"""Folder below which each rank keeps its own compile caches."""
DATA: Final = "TITAN_TUNE_DATA"
"""Overrides ``titan_tune.data``."""
WARDEN_PID: Final = "TITAN_TUNE_WARDEN_PID"
"""The supervisor of the launcher: a worker whose parent it has become has lost its launcher."""
PROBE_ID: Final = "TITAN_TUNE_PROBE_ID"
"""Marks every process of one attempt, so that none can be lost."""
DRY_RUN_RANK: Final = "TITAN_TUNE_DRY_RUN_RANK"
"""The rank that this process is in a job of ``NGPU`` ranks, with ``comm.mode=fake_backend``."""


@dataclass(frozen=True, slots=True)
class PluginEnvironment:
    """The variables, read once."""

    metrics_directory: Path | None
    cache_directory: Path | None
    data: str | None
    warden_pid: int | None
    rank: int
    """The simulated one in a dry run."""
    dry_run_rank: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> PluginEnvironment:
        """From ``environ``; empty values count as unset."""
        metrics, cache = environ.get(METRICS_DIR), environ.get(CACHE_DIR)
        warden_pid, simulated = environ.get(WARDEN_PID), environ.get(DRY_RUN_RANK)
        return cls(
            metrics_directory=Path(metrics) if metrics else None,
            cache_directory=Path(cache) if cache else None,
            data=environ.get(DATA) or None,
            warden_pid=int(warden_pid) if warden_pid else None,
            rank=int(simulated or environ.get("RANK", "0")),
            dry_run_rank=int(simulated) if simulated else None,
        )
