"""``reports/faults.md``: what titan-tune made of each fault that the tests injected into real components.

The rows are kept in ``reports/faults.jsonl`` too, so that a run of some of the tests replaces their rows alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

DATA, TABLE = "faults.jsonl", "faults.md"
HEAD = """\
# Injected faults

Written by `pytest --write-reports` from tests that run real daemons and break them. A row is written after the test has
checked it: the classification, that there is exactly one outcome, and that no job and no process is left.
"""


@dataclass(frozen=True)
class Row:
    area: str
    """Slurm, storage, searcher."""
    fault: str
    """What was done."""
    seen: str
    """What titan-tune said."""
    after: str
    """What became of the probe."""


def write(directory: Path, rows: Iterable[Row]) -> None:
    """Merge ``rows`` into the report; numbers that differ from run to run are left out."""
    data = directory / DATA
    known = [Row(**json.loads(line)) for line in data.read_text().splitlines()] if data.exists() else []
    merged = {(row.area, row.fault): row for row in known}
    merged |= {(row.area, row.fault): Row(row.area, row.fault, _stable(row.seen), row.after) for row in rows}
    ordered = sorted(merged.values(), key=lambda row: (row.area, row.fault))
    data.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ordered))
    (directory / TABLE).write_text(render(ordered))


def render(rows: Iterable[Row]) -> str:
    """The rows as Markdown, one table an area."""
    parts, area = [HEAD], None
    for row in rows:
        if row.area != area:
            area = row.area
            parts.append(f"\n## {area}\n\n| Fault | titan-tune says | The probe |\n| --- | --- | --- |\n")
        parts.append("| " + " | ".join(map(_cell, (row.fault, row.seen, row.after))) + " |\n")
    return "".join(parts)


def _stable(text: str) -> str:
    text = re.sub(r"\bjob \d+", "job N", text)
    text = re.sub(r"after \d+ s\b", "after T s", text)
    return re.sub(r"/tmp/\S+", "FOLDER", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
