"""What reports/trace_accuracy.md and reports/trace_layouts.jsonl say of each measured row."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from h200_rows import ROOT, Row

TRACES = ROOT / "reports" / "trace_accuracy.md"
LAYOUTS = ROOT / "reports" / "trace_layouts.jsonl"
_TRACED = re.compile(
    r"\| (?P<id>\S+)(?: rank (?P<rank>\d+))? \| [\d.]+ \| (?P<active>[\d.]+) \| \S+ % "
    r"\| [\d.]+ \| (?P<reserved>[\d.]+) \| \S+ % \| (?P<phase>\w+) \|"
)
Traces = Mapping[tuple[str, int], tuple[float, float, str]]
"""Active and reserved GiB and the peak phase by run and rank."""


def traces() -> Traces:
    """Traced active and reserved GiB and the peak phase by run and rank; of a row traced twice, the later."""
    made: dict[tuple[str, int], tuple[float, float, str]] = {}
    for line in _lines(TRACES):
        m = _TRACED.match(line)
        if m is not None:
            made[m["id"], int(m["rank"] or 0)] = (float(m["active"]), float(m["reserved"]), m["phase"])
    for row in map(json.loads, _lines(LAYOUTS)):
        if not row["error"]:
            made[row["id"], row["rank"]] = (row["traced_active"], row["traced_reserved"], row["phase"])
    return made


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def worst_trace(row: Row, traced: Traces) -> tuple[float, str]:
    """Active GiB and peak phase of the rank with the most."""
    active, _, phase = max(figures for (run, _), figures in traced.items() if run == row.id)
    return active, phase
