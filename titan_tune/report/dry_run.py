"""The terminal view of a dry run: ranks, what was added to compute, and what the ranks said to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_tune.estimate.answer import Answer
from titan_tune.report.estimate import job_line, view
from titan_tune.units import format_gib

MAX_COLLECTIVES = 8
"""Rows of the table of collectives; the others are small."""


def dry_run_view(answer: Answer) -> RenderableType:
    """Everything about a job that was run rank by rank; the plain view where nothing came of it."""
    details = answer.dry_run
    if details is None:
        return view(answer)
    if details["validity_only"]:
        return _valid(answer, details)
    if "ranks" not in details:
        return view(answer)
    return Group(
        view(answer), Text(), ranks_table(answer, details), *_speed(answer, details), *_talk(details)
    )


def _valid(answer: Answer, details: Mapping[str, Any]) -> RenderableType:
    ranks = ", ".join(map(str, details["ranks"]))
    return Group(
        Text.assemble(("valid", "bold green"), f"  {job_line(answer.settings)}"),
        Text(
            f"rank {ranks} ran alone on this machine's processor: torchtitan takes the configuration. "
            "Memory and speed need a GPU (or --method formula, --method trace)."
        ),
    )


def ranks_table(answer: Answer, details: Mapping[str, Any]) -> Table:
    """One row a simulated rank, the one that needs most in bold."""
    table = Table(box=None, pad_edge=False)
    pipeline = answer.settings.dims.pp > 1
    table.add_column("rank")
    if pipeline:
        table.add_column("pipeline rank", justify="right")
    for name in ("active", "reserved", "compute"):
        table.add_column(name, justify="right")
    most = max(details["ranks"], key=lambda rank: float(rank["active_gib"]))
    for rank in details["ranks"]:
        cells = [str(rank["rank"]), *([str(rank["pipeline_rank"])] if pipeline else [])]
        cells += [f"{rank['active_gib']:.1f} GiB", f"{rank['reserved_gib']:.1f} GiB"]
        cells.append(f"{rank['compute_seconds']:.3f} s")
        table.add_row(*cells, style="bold" if rank is most and len(details["ranks"]) > 1 else "")
    return table


def _speed(answer: Answer, details: Mapping[str, Any]) -> Iterator[RenderableType]:
    if answer.step_time is None:
        return
    tokens = answer.step_time.tokens_per_second_per_gpu * answer.step_time.seconds
    table = Table.grid(padding=(0, 2))
    rows = [
        (
            "compute only",
            details["compute_seconds"],
            f"{tokens / details['compute_seconds']:,.0f} tokens/s per GPU",
        )
    ]
    causes = [
        f"{cause} {seconds:.3f} s"
        for cause, seconds in details["exposed_seconds"].items()
        if seconds >= 0.0005
    ]
    rows.append(("communication", details["communication_seconds"], ", ".join(causes)))
    if waiting := details.get("waiting_seconds"):  # studies begun with 0.1 lack it
        rows.append(("slowest rank", waiting, "ranks meet in every step, as found on two GPUs"))
    if answer.settings.dims.pp > 1:
        rows.append(
            ("pipeline bubble", details["bubble_seconds"], "from the schedule and the measured passes")
        )
    for name, seconds, note in rows:
        table.add_row(
            Text(name, style="bold"), Text(f"{seconds:.3f} s", justify="right"), Text(note, style="dim")
        )
    yield Text()
    yield table
    yield Text(
        f"outside the allocator: {format_gib(details['outside_allocator_gib'] * 2**30)}, from a model",
        style="dim",
    )


def _talk(details: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The collectives of the rank that issues most."""
    busiest = max(details["ranks"], key=lambda rank: sum(float(row["gib"]) for row in rank["collectives"]))
    rows = busiest["collectives"]
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("collectives of a step", "left"),
        ("for", "left"),
        ("ranks", "right"),
        ("apart", "right"),
        ("calls", "right"),
        ("GiB", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for row in rows[:MAX_COLLECTIVES]:
        table.add_row(
            row["op"].replace("_", " "),
            row["cause"],
            str(row["group_size"]),
            str(row["stride"]),
            f"{row['count']:,}",
            f"{row['gib']:.3f}",
        )
    yield Text()
    yield table
