"""The measured H200 rows for the benchmarks: the same helper that the tests use."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "estimate"))

from h200 import Row, rows  # noqa: E402

__all__ = ["ROOT", "Row", "rows"]
