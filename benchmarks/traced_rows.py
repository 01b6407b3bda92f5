"""What reports/trace_accuracy.md says of each measured row."""

from __future__ import annotations

import re
from collections.abc import Mapping

from h200_rows import ROOT, Row

TRACES = ROOT / "reports" / "trace_accuracy.md"
_TRACED = re.compile(
    r"\| (?P<id>\S+)(?: rank (?P<rank>\d+))? \| [\d.]+ \| (?P<active>[\d.]+) \| \S+ % "
    r"\| [\d.]+ \| (?P<reserved>[\d.]+) \| \S+ % \| (?P<phase>\w+) \|"
)
Traces = Mapping[tuple[str, int], tuple[float, float, str]]
"""Active and reserved GiB and the peak phase by run and rank."""


def traces() -> Traces:
    """Traced active and reserved GiB and the peak phase by run and rank, from the trace report."""
    if not TRACES.exists():
        return {}
    found = (_TRACED.match(line) for line in TRACES.read_text().splitlines())
    return {
        (m["id"], int(m["rank"] or 0)): (float(m["active"]), float(m["reserved"]), m["phase"])
        for m in found
        if m is not None
    }


def worst_trace(row: Row, traced: Traces) -> tuple[float, str]:
    """Active GiB and peak phase of the rank with the most."""
    active, _, phase = max(figures for (run, _), figures in traced.items() if run == row.id)
    return active, phase
