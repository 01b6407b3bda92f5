"""Traces every measured H200 row, one after another, and writes reports/trace_accuracy.md.

    python benchmarks/trace_accuracy.py [--layouts] [--only SUBSTRING] [--skip SUBSTRING] [--jsonl FILE]

``--layouts`` takes the rows of further layouts and models and the dry-run ranks, and writes reports/trace_layouts.md.
Rows already in FILE are not traced again; with ``--layouts`` it is reports/trace_layouts.jsonl unless named. Rows that
are left out (``--only``, ``--skip``) stay in the report where FILE has them, with the day of their trace, and are
named where it has not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titan_tune.titan.job import job_from_text
from titan_tune.trace import TraceError, trace_memory
from titan_tune.units import GIB

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "h200_measured.jsonl"
LAYOUTS = ROOT / "tests" / "data" / "h200_rows_layouts.jsonl"
REPORT = ROOT / "reports" / "trace_accuracy.md"
LAYOUTS_REPORT = ROOT / "reports" / "trace_layouts.md"
LAYOUTS_TRACES = ROOT / "reports" / "trace_layouts.jsonl"
DRY_RUNS = ROOT / "tests" / "data" / "h200_dry_runs.jsonl"
DRY_RUN = "dry-run:"
"""In front of the ids of dry runs, some of which are those of real runs."""

ACTIVE_GOAL = 0.002
RESERVED_GOAL = 0.01

# how the rows' flavors reach their feed-forward width (torchtitan's llama3 arguments)
FEED_FORWARD: dict[str, dict[str, Any]] = {
    "60M": {},
    "1B": {"ffn_dim_multiplier": 1.5},
    "3B": {"ffn_dim_multiplier": 1.0},
    "7B": {},
    "8B": {"ffn_dim_multiplier": 1.3, "multiple_of": 1024},
}


@dataclass(frozen=True)
class Rank:
    """A measured rank and the job that it was part of."""

    id: str
    rank: int
    active: float
    """GiB, as is ``reserved``."""
    reserved: float
    world_size: int
    values: Mapping[str, Any]
    model_args: Mapping[str, Any]


@dataclass
class Line:
    id: str
    rank: int
    active: float
    reserved: float
    traced_active: float | None = None
    traced_reserved: float | None = None
    phase: str = ""
    seconds: float = 0.0
    error: str = ""
    date: str = ""

    @property
    def active_error(self) -> float | None:
        return None if self.traced_active is None else self.traced_active / self.active - 1

    @property
    def reserved_error(self) -> float | None:
        return None if self.traced_reserved is None else self.traced_reserved / self.reserved - 1


def model_args(row: dict[str, Any]) -> dict[str, Any]:
    args = {key: row[key] for key in ("dim", "n_layers", "n_heads", "vocab_size")}
    if row["n_kv_heads"]:
        args["n_kv_heads"] = row["n_kv_heads"]
    return args | FEED_FORWARD[row["flavor"]]


def measured_ranks(data: Path) -> Iterator[Rank]:
    """Each rank of a pipeline; one rank where all measure the same."""
    for row in _rows(data):
        if "model" in row:
            values = {**row["config"], "model.name": row["model"], "model.flavor": row["flavor"]}
            args: Mapping[str, Any] = model_args(row)
        else:
            job = job_from_text("", name=row["id"]).with_values(row["config"])
            values, args = job.resolved(), job.model_args
        pipeline = row["config"].get("parallelism.pipeline_parallel_degree", 1) > 1
        for rank in range(row["world_size"] if pipeline else 1):
            active, reserved = row["active_gib"][rank], row["reserved_gib"][rank]
            yield Rank(row["id"], rank, active, reserved, row["world_size"], values, args)


def dry_run_ranks() -> Iterator[Rank]:
    """Of jobs that no measured row has; those of the real two-GPU rows are traced for reports/trace_accuracy.md."""
    traced = {row["id"] for row in _rows(DATA)}
    for row in _rows(DRY_RUNS):
        if row.get("real") in traced:
            continue
        job = job_from_text("", name=row["id"]).with_values(row["config"])
        for rank, found in row["ranks"].items():
            active, reserved = found["active_bytes"] / GIB, found["reserved_bytes"] / GIB
            yield Rank(
                DRY_RUN + row["id"],
                int(rank),
                active,
                reserved,
                row["world_size"],
                job.resolved(),
                job.model_args,
            )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def trace_rank(rank: Rank) -> Line:
    line = Line(rank.id, rank.rank, rank.active, rank.reserved, date=f"{datetime.now(UTC):%Y-%m-%d}")
    began = time.monotonic()
    try:
        result = trace_memory(
            rank.values, model_args=rank.model_args, world_size=rank.world_size, rank=rank.rank
        )
    except TraceError as error:
        line.error = str(error)
    else:
        line.traced_active = result.active_bytes / GIB
        line.traced_reserved = (result.reserved_bytes or 0) / GIB
        line.phase = result.phase
    line.seconds = round(time.monotonic() - began, 1)
    return line


def cached(cache: Path | None) -> dict[tuple[str, int], Line]:
    """Traces made before by row and rank; the last of each counts."""
    if cache is None or not cache.exists():
        return {}
    made = (Line(**row) for row in _rows(cache))
    return {(line.id, line.rank): line for line in made}


def lines(ranks: list[Rank], wanted: Callable[[str], bool], cache: Path | None) -> list[Line]:
    """The line of each rank that is wanted or was traced before."""
    done, made = cached(cache), []
    for rank in ranks:
        line = done.get((rank.id, rank.rank))
        if wanted(rank.id) and (line is None or line.error):
            line = trace_rank(rank)
            if cache is not None:
                with cache.open("a") as out:
                    out.write(json.dumps(asdict(line)) + "\n")
        if line is not None:
            print(text_of(line), flush=True)
            made.append(line)
    return made


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.2f} %"


def text_of(line: Line) -> str:
    def gib(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    cells = [
        line.id + (f" rank {line.rank}" if line.rank else ""),
        gib(line.active),
        gib(line.traced_active),
        percent(line.active_error),
        gib(line.reserved),
        gib(line.traced_reserved),
        percent(line.reserved_error),
        line.error or line.phase,
        f"{line.seconds:.0f}",
        *([line.date] if line.date else []),
    ]
    return "| " + " | ".join(cells) + " |"


def summary(name: str, errors: list[float]) -> str:
    sizes = [abs(e) for e in errors]
    return (
        f"{name}: mean |error| {100 * statistics.mean(sizes):.3f} %, median "
        f"{100 * statistics.median(sizes):.3f} %, worst {100 * max(sizes):.2f} % over {len(sizes)} values"
    )


def beyond(made: list[Line]) -> list[str]:
    return [
        f"{line.id} rank {line.rank}"
        for line in made
        if abs(line.active_error or 0) > ACTIVE_GOAL or abs(line.reserved_error or 0) > RESERVED_GOAL
    ]


def report(made: list[Line], missing: list[str]) -> str:
    active = [line.active_error for line in made if line.active_error is not None]
    reserved = [line.reserved_error for line in made if line.reserved_error is not None]
    return "\n".join(
        [
            "# Traced against measured memory",
            "",
            "Measured: NVIDIA H200, torch 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0, expandable segments.",
            "Traced: CPU with two cores, fake tensors, one row after another "
            "(`python benchmarks/trace_accuracy.py`; `--layouts` for further layouts and models), "
            f"torch {version('torch')}. Seconds are wall clock with "
            "imports; other jobs may have shared the machine."
            + (" A row's last column is the day of its trace." if any(line.date for line in made) else ""),
            "",
            f"- {summary('active', active)}",
            f"- {summary('reserved', reserved)}",
            f"- failed: {sum(bool(line.error) for line in made)} of {len(made)}",
            f"- not traced: {', '.join(missing) or 'none'}",
            "",
            f"Goals: active within {100 * ACTIVE_GOAL:.1f} % and reserved within {100 * RESERVED_GOAL:.0f} % on "
            f"average. Rows beyond: {', '.join(beyond(made)) or 'none'}; what is known about them is in "
            "`docs/decisions/0003-trace.md`.",
            "",
            *table_head(made),
            *(text_of(line) for line in made),
            "",
        ]
    )


def table_head(made: list[Line]) -> tuple[str, str]:
    dated = any(line.date for line in made)
    head = "| row | active GiB | traced | error | reserved GiB | traced | error | peak phase | seconds |"
    return head + (" on |" if dated else ""), "|---" * (10 if dated else 9) + "|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="trace rows whose id contains this alone")
    parser.add_argument(
        "--skip", action="append", default=[], help="do not trace rows whose id contains this"
    )
    parser.add_argument("--jsonl", type=Path, help="keep traced rows here and do not trace them again")
    parser.add_argument("--layouts", action="store_true", help="further layouts and models, and dry runs")
    arguments = parser.parse_args()
    if arguments.layouts:
        ranks, target = [*dry_run_ranks(), *measured_ranks(LAYOUTS)], LAYOUTS_REPORT
        cache = arguments.jsonl or LAYOUTS_TRACES
    else:
        ranks, target, cache = list(measured_ranks(DATA)), REPORT, arguments.jsonl

    def wanted(row: str) -> bool:
        chosen = not arguments.only or any(text in row for text in arguments.only)
        return chosen and not any(text in row for text in arguments.skip)

    made = lines(ranks, wanted, cache)
    seen = {(line.id, line.rank) for line in made}
    missing = [f"{rank.id} rank {rank.rank}" for rank in ranks if (rank.id, rank.rank) not in seen]
    text = report(made, missing)
    if arguments.layouts or not missing:
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    print(text.split("| row")[0])


if __name__ == "__main__":
    main()
