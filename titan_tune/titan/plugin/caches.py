"""Compile caches: one folder a rank, kept across the probes of a study."""

from __future__ import annotations

import os
from pathlib import Path


def use_rank_caches(directory: Path, rank: int) -> None:
    """Point Inductor and Triton at ``directory/rank{rank}``; both read these variables when they compile.

    Ranks that share one Triton cache can lose files to each other (torchtitan #2146).
    """
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        path = directory / f"rank{rank}" / name
        path.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(path)
