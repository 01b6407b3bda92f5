"""The same probes started by torchrun and preloaded: are the results identical, and what does a start cost?

    python benchmarks/launchers.py SPACE.toml -o reports/launchers.md [--configurations 3] [--devices 0]

The best candidates by prediction, each of them cold (compile caches of its own, empty) and then warm (those caches),
with both launchers in turn. Losses and, on GPUs, peak active and reserved bytes of every rank must be equal to the
last bit. Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from measure_table import Slot, spec_of

from titan_tune.domain.probe import ProbeOutcome
from titan_tune.probe.local import LAUNCHERS, LocalRunner
from titan_tune.space.file import load_space
from titan_tune.study.plan import Plan, Ranked, make_plan

POLL_SECONDS = 0.1
PHASES = ("launch", "imports", "init", "first_step", "compile", "steps", "shutdown")
STATES = ("cold", "warm")


@dataclass(frozen=True)
class Run:
    """One finished probe."""

    label: str
    launcher: str
    state: str
    """Of its compile caches."""
    outcome: ProbeOutcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the report."""
    options = parse(arguments)
    plan = make_plan(load_space(options.space))
    items = sorted(plan.by_id.values(), key=lambda r: -r.predicted_tokens_per_second)[
        : options.configurations
    ]
    runs = measure(plan, items, options)
    pairs = compared(runs)
    text = report(runs, pairs, plan, options)
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0 if pairs and not any(differences for *_, differences in pairs) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--configurations", type=int, default=3)
    parser.add_argument("--devices", default="0", help="device indices of one probe, e.g. 0,1")
    parser.add_argument("--runs", type=Path, default=Path("runs/launchers"))
    return parser.parse_args(arguments)


def measure(plan: Plan, items: Sequence[Ranked], options: argparse.Namespace) -> list[Run]:
    """Every configuration, launcher and state of the caches, one at a time."""
    runs = []
    device = "cpu" if plan.space.cluster.gpu.is_cpu else "cuda"
    slot = Slot(0, options.devices)
    per_node = plan.space.cluster.gpus_per_node
    for launcher in LAUNCHERS:
        with LocalRunner(per_node, device, launcher=launcher) as runner:
            for item in items:
                caches = (
                    options.runs.absolute() / f"cache-{launcher}-{item.candidate.config_id}-{time.time_ns()}"
                )
                for state in STATES:
                    spec = replace(spec_of(plan, item, slot, options.runs), cache_directory=caches)
                    probe = runner.start(spec)
                    while (outcome := probe.poll()) is None:
                        time.sleep(POLL_SECONDS)
                    used = str(outcome.details.get("launcher"))
                    print(
                        f"{used:10} {state} {outcome.seconds:6.1f} s  {outcome.message}  {item.label}",
                        flush=True,
                    )
                    runs.append(Run(item.label, used, state, outcome))
    return runs


def compared(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(configuration, state, what differs) for each pair; empty text where nothing does."""
    by_key = {(run.label, run.state, run.launcher): run.outcome for run in runs}
    return [
        (run.label, run.state, differences(run.outcome, other))
        for run in runs
        if run.launcher == "torchrun"
        and (other := by_key.get((run.label, run.state, "preloaded"))) is not None
    ]


def differences(torchrun: ProbeOutcome, preloaded: ProbeOutcome) -> str:
    """What two outcomes of one probe do not have in common."""
    found = []
    if torchrun.status is not preloaded.status:
        return f"status: {torchrun.status} against {preloaded.status}"
    if torchrun.measurement is None or preloaded.measurement is None:
        return "" if torchrun.message == preloaded.message else "message"
    a, b = torchrun.measurement, preloaded.measurement
    common = min(len(a.losses), len(b.losses))  # early stops come when they come
    if a.losses[:common] != b.losses[:common]:
        found.append(f"losses: {a.losses[:common]} against {b.losses[:common]}")
    # a fork does not touch every page of the libraries that its parent loaded: resident sets differ
    for name in ("active_bytes", "reserved_bytes") if a.memory_kind == "cuda" else ():
        peaks = [[getattr(memory, name) for memory in m.memory] for m in (a, b)]
        if peaks[0] != peaks[1]:
            found.append(f"{name}: {peaks[0]} against {peaks[1]}")
    return "; ".join(found)


def report(
    runs: Sequence[Run], pairs: Sequence[tuple[str, str, str]], plan: Plan, options: argparse.Namespace
) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchtitan"))
    cluster = plan.space.cluster
    lines = [
        "# Probes started by torchrun and preloaded",
        "",
        f"{cluster.gpus_per_node} x {cluster.gpu.name}, {versions}, {datetime.datetime.now(datetime.UTC).date()}, "
        f"`{options.space}`. Command: `python benchmarks/launchers.py {options.space} --configurations "
        f"{options.configurations}`. Compared: losses of all steps, peak active and reserved bytes of all ranks.",
        "",
        "| configuration | caches | tokens/s torchrun | preloaded | differs |",
        "|---|---|---|---|---|",
    ]
    speed = {
        (run.label, run.state, run.launcher): run.outcome.measurement.tokens_per_second_per_gpu
        for run in runs
        if run.outcome.measurement
    }
    for label, state, differs in pairs:
        cells = (speed.get((label, state, name)) for name in ("torchrun", "preloaded"))
        said = " | ".join("" if cell is None else f"{cell:,.0f}" for cell in cells)
        lines.append(f"| {label} | {state} | {said} | {differs or 'nothing'} |")
    lines += [
        "",
        "Median seconds of a probe by phase. The first preloaded probe waits for the imports and is left out;",
        "compile is part of first_step.",
        "",
        f"| launcher | caches | {' | '.join(PHASES)} | whole probe |",
        f"|---|---|{'---|' * len(PHASES)}---|",
    ]
    first = next((run for run in runs if run.launcher == "preloaded"), None)
    for launcher in sorted({run.launcher for run in runs}):
        for state in STATES:
            chosen = [r for r in runs if (r.launcher, r.state) == (launcher, state) and r is not first]
            timed = [phases for r in chosen if (phases := r.outcome.details.get("phases"))]
            if timed:
                cells = (f"{median(phases.get(name, 0.0) for phases in timed):.1f}" for name in PHASES)
                whole = median(r.outcome.seconds for r in chosen)
                lines.append(f"| {launcher} | {state} | {' | '.join(cells)} | {whole:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
