"""Measure every candidate of a space, several at a time where the machine has the GPUs.

    python benchmarks/measure_table.py SPACE.toml -o TABLE.jsonl --seconds 540 [--repeats 2]

Real probes, as a search runs them, without a search. Each takes the GPUs of one slot. Rows are appended as they
come, and a second run goes on where the first stopped. What does not fit by the formula is left out. Once all are
measured, the fastest are measured again (``--repeats``), so that noise can be told from difference.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_tune.domain.probe import ProbeOutcome, ProbeSpec, ProbeStatus
from titan_tune.probe.files import Metrics
from titan_tune.probe.local import LocalProbe, LocalRunner
from titan_tune.probe.measurement import throughputs
from titan_tune.probe.statistics import measured
from titan_tune.probe.toml import probe_values
from titan_tune.space.file import load_space
from titan_tune.study.plan import Plan, Ranked, make_plan
from titan_tune.titan.job import render

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Slot:
    """The GPUs of one probe."""

    number: int
    devices: str

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """What limits a probe to them."""
        return (("CUDA_VISIBLE_DEVICES", self.devices),)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse(arguments)
    plan = make_plan(load_space(options.space))
    table = Table(options.output)
    if not table.rows:
        table.add(header(options, plan))
    queue = work(plan, table.rows, repeats=options.repeats, best=options.best)
    free = slots(options.devices, plan.space.cluster.gpus_per_node)
    flights: list[Flight] = []
    begun = time.monotonic()
    device = "cpu" if plan.space.cluster.gpu.is_cpu else "cuda"
    with LocalRunner(plan.space.cluster.gpus_per_node, device, launcher=options.launcher) as runner:
        while time.monotonic() - begun < options.seconds:
            for flight in [flight for flight in flights if flight.probe.poll() is not None]:
                flights.remove(flight)
                free.append(flight.slot)
                row = flight.row()
                table.add(row)
                print(f"{time.monotonic() - begun:5.0f} s  {describe(row)}  {flight.item.label}", flush=True)
            while free and (item := next(queue, None)) is not None:
                slot = free.pop(0)
                probe = runner.start(spec_of(plan, item, slot, options.runs))
                flights.append(Flight(item, slot, probe))
            if not flights:
                break
            time.sleep(POLL_SECONDS)


class Table:
    """The rows so far, in memory and in the file."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.path = path
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Flight:
    """One probe in flight."""

    item: Ranked
    slot: Slot
    probe: LocalProbe

    def row(self) -> dict[str, Any]:
        """The finished probe as the table has it."""
        outcome = self.probe.outcome
        assert outcome is not None
        return row_of(self.item, self.probe.spec, outcome, self.slot)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop what still runs after this long"
    )
    parser.add_argument("--repeats", type=int, default=1, help="measure the fastest this many times in all")
    parser.add_argument("--best", type=int, default=8, help="how many count as the fastest")
    parser.add_argument("--devices", default="0", help="device indices, e.g. 0,1,2,3")
    parser.add_argument("--launcher", default="preloaded", choices=("preloaded", "torchrun"))
    parser.add_argument("--runs", type=Path, default=Path("runs/table"))
    return parser.parse_args(arguments)


def slots(devices: str, size: int) -> list[Slot]:
    """The devices in groups of ``size``."""
    names = devices.split(",")
    groups = [names[i : i + size] for i in range(0, len(names) - size + 1, size)]
    return [Slot(number, ",".join(group)) for number, group in enumerate(groups)]


def work(plan: Plan, done: list[dict[str, Any]], *, repeats: int, best: int) -> Iterator[Ranked]:
    """Every candidate once, then the ``best`` of them until each was measured ``repeats`` times.

    The job as it is comes first; candidates that compile alike follow each other; ``done`` grows while this runs.
    """
    seen = {row["config_id"] for row in done if "config_id" in row}
    baseline = plan.baseline and plan.baseline.candidate.config_id
    items = sorted(
        plan.by_id.values(),
        key=lambda r: (
            r.candidate.config_id != baseline,
            r.candidate.choices.get("compile", ""),
            -r.predicted_tokens_per_second,
            r.candidate.config_id,
        ),
    )
    yield from (item for item in items if item.candidate.config_id not in seen)
    for _ in range(1, repeats):
        speeds: dict[str, float] = {}
        for row in done:
            if row.get("status") == ProbeStatus.COMPLETED:
                speeds.setdefault(row["config_id"], row["tokens_per_second_per_gpu"])
        for config_id in sorted(speeds, key=lambda name: (-speeds[name], name))[:best]:
            yield plan.by_id[config_id]


def spec_of(plan: Plan, item: Ranked, slot: Slot, runs: Path) -> ProbeSpec:
    """The probe as a search would run it."""
    space, candidate = plan.space, item.candidate
    job = space.base.with_values(candidate.values)
    directory = runs.absolute() / f"{candidate.config_id}-{time.time_ns()}"
    device = "cpu" if space.cluster.gpu.is_cpu else "cuda"
    overrides = probe_values(job.resolved(), space.probe, directory, device)
    tokens = space.global_batch_size * int(job.get("training.seq_len"))
    return ProbeSpec(
        config_id=candidate.config_id,
        directory=directory,
        toml=render(space.base, {**candidate.values, **overrides}),
        nproc_per_node=space.cluster.gpus_per_node,
        device=device,
        settings=space.probe,
        cache_directory=runs.absolute() / f"cache{slot.number}",
        tokens_per_step_per_rank=tokens / space.cluster.world_size,
        environment=slot.environment,
    )


def header(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What the table is of."""
    return {
        "kind": "table",
        "space": str(options.space),
        "gpu": plan.space.cluster.gpu.name,
        "gpus": plan.space.cluster.world_size,
        "slots": len(slots(options.devices, plan.space.cluster.gpus_per_node)),
        "candidates": len(plan.by_id),
        "baseline": plan.baseline.candidate.config_id if plan.baseline else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{name: importlib.metadata.version(name) for name in ("torch", "torchtitan", "torchao")},
    }


def row_of(item: Ranked, spec: ProbeSpec, outcome: ProbeOutcome, slot: Slot) -> dict[str, Any]:
    """One probe as the table has it."""
    metrics = Metrics(spec.directory)
    metrics.read_new()
    steps = measured(metrics.slowest(spec.nproc_per_node), spec.settings.warmup_steps)
    m = outcome.measurement
    row: dict[str, Any] = {
        "config_id": item.candidate.config_id,
        "choices": dict(item.candidate.choices),
        "values": dict(item.candidate.values),
        "status": str(outcome.status),
        "message": outcome.message,
        "seconds": round(outcome.seconds, 2),
        "slot": slot.number,
        "predicted": item.outlook.tokens_per_second_per_gpu,
        "compiler": outcome.details.get("compiler"),
        "launcher": outcome.details.get("launcher"),
    }
    if m is not None:
        row |= {
            "tokens_per_second_per_gpu": round(m.tokens_per_second_per_gpu, 1),
            "interval": [round(x, 1) for x in m.interval],
            "step_tokens_per_second": [round(x, 1) for x in throughputs(spec, steps)],
            "time_to_first_step": round(m.time_to_first_step, 2),
            "memory": [[r.rank, r.active_bytes, r.reserved_bytes, r.device_bytes] for r in m.memory],
            "alloc_retries": m.alloc_retries,
            "losses": [round(x, 5) for x in m.losses],
        }
    return row


def describe(row: dict[str, Any]) -> str:
    """One line."""
    speed = row.get("tokens_per_second_per_gpu")
    said = f"{speed:10,.0f} tokens/s" if speed else f"{row['status']}: {row['message'][:60]}"
    return f"{said}  {row['seconds']:5.1f} s"


if __name__ == "__main__":
    main()
