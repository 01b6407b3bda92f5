"""Traces every measured H200 row, one after another, and writes reports/trace_accuracy.md.

    python benchmarks/trace_accuracy.py [--layouts] [--only SUBSTRING] [--jsonl FILE]

``--layouts`` takes the rows of further layouts and models and writes reports/trace_layouts.md. With ``--jsonl`` rows
already in FILE are not traced again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


def trace_row(row: dict[str, Any], rank: int) -> Line:
    line = Line(row["id"], rank, row["active_gib"][rank], row["reserved_gib"][rank])
    if "model" in row:
        values = {**row["config"], "model.name": row["model"], "model.flavor": row["flavor"]}
        args: Mapping[str, Any] = model_args(row)
    else:
        job = job_from_text("", name=row["id"]).with_values(row["config"])
        values, args = job.resolved(), job.model_args
    began = time.monotonic()
    try:
        result = trace_memory(values, model_args=args, world_size=row["world_size"], rank=rank)
    except TraceError as error:
        line.error = str(error)
    else:
        line.traced_active = result.active_bytes / GIB
        line.traced_reserved = (result.reserved_bytes or 0) / GIB
        line.phase = result.phase
    line.seconds = round(time.monotonic() - began, 1)
    return line


def lines(data: Path, only: str, cache: Path | None) -> list[Line]:
    done: dict[tuple[str, int], Line] = {}
    if cache is not None and cache.exists():
        for text in cache.read_text().splitlines():
            line = Line(**json.loads(text))
            done[line.id, line.rank] = line
    made = []
    for row in map(json.loads, data.read_text().splitlines()):
        # without a pipeline all ranks measure the same
        pipeline = row["config"].get("parallelism.pipeline_parallel_degree", 1) > 1
        for rank in range(row["world_size"] if pipeline else 1):
            if only not in row["id"]:
                continue
            line = done.get((row["id"], rank))
            if line is None or line.error:
                line = trace_row(row, rank)
                if cache is not None:
                    with cache.open("a") as out:
                        out.write(json.dumps(asdict(line)) + "\n")
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


def report(made: list[Line]) -> str:
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
            "imports; other jobs may have shared the machine.",
            "",
            f"- {summary('active', active)}",
            f"- {summary('reserved', reserved)}",
            f"- failed: {sum(bool(line.error) for line in made)} of {len(made)}",
            "",
            f"Goals: active within {100 * ACTIVE_GOAL:.1f} % and reserved within {100 * RESERVED_GOAL:.0f} % on "
            f"average. Rows beyond: {', '.join(beyond(made)) or 'none'}; what is known about them is in "
            "`docs/decisions/0003-trace.md`.",
            "",
            "| row | active GiB | traced | error | reserved GiB | traced | error | peak phase | seconds |",
            "|---|---|---|---|---|---|---|---|---|",
            *(text_of(line) for line in made),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose id contains this")
    parser.add_argument("--jsonl", type=Path, help="keep traced rows here and do not trace them again")
    parser.add_argument("--layouts", action="store_true", help="the rows of further layouts and models")
    arguments = parser.parse_args()
    data, target = (LAYOUTS, LAYOUTS_REPORT) if arguments.layouts else (DATA, REPORT)
    text = report(lines(data, arguments.only, arguments.jsonl))
    if not arguments.only:
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    print(text.split("| row")[0])


if __name__ == "__main__":
    main()
