"""``titan-tune doctor``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from titan_tune.doctor import Check, Status, checks
from titan_tune.errors import ProbesFailedError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Final = 1
_STYLES: Final = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def run_doctor(*, as_json: bool, console: Console) -> int:
    """Check this machine and print what was found; 0, or 4 if probes cannot run here."""
    found = checks()
    if as_json:
        print(json.dumps(as_dict(found), indent=2))
    else:
        _print(found, console)
    return exit_code(found)


def as_dict(found: Sequence[Check]) -> dict[str, object]:
    """As ``doctor --json`` prints it."""
    can_probe = exit_code(found) == 0
    return {"schema": SCHEMA, "probes_can_run": can_probe, "checks": [check.as_dict() for check in found]}


def exit_code(found: Sequence[Check]) -> int:
    """0 without a failed check."""
    return ProbesFailedError.exit_code if any(check.status is Status.FAIL for check in found) else 0


def _print(found: Sequence[Check], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found", "meaning"):
        table.add_column(heading, overflow="fold")
    for check in found:
        meaning = Text(check.meaning)
        if check.fix:
            meaning.append(f"\nfix: {check.fix}", style="green")
        status = Text(check.status.value, style=_STYLES[check.status])
        table.add_row(status, check.name, Text(check.found), meaning)
    console.print(table)
    counts = {status: sum(check.status is status for check in found) for status in Status}
    if counts[Status.FAIL]:
        console.print(f"probes cannot run here: {counts[Status.FAIL]} check(s) failed", style="bold red")
    elif counts[Status.WARN]:
        console.print(f"probes can run here; {counts[Status.WARN]} warning(s)", style="yellow")
    else:
        console.print("probes can run here", style="green")
