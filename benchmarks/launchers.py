"""The same probes started by torchrun and preloaded: do the results differ, and what does a start cost?

    python benchmarks/launchers.py SPACE.toml -o reports/launchers.md [--configurations 3] [--repeats 2] [--devices 0]

The best candidates by prediction, each of them cold (compile caches of its own, empty) and then warm (those caches),
with both launchers in turn and every launcher at least twice. Peak active and reserved bytes of every rank must be
equal to the byte (on GPUs). Losses need not be: kernels that add in an order of chance make two runs of one launcher
differ, so a launcher's difference from itself is the yardstick. Exit code 1 where peaks differ, where losses of the
two launchers are more than ``MAX_SPREADS`` times as far apart as those of one, or where there was nothing to compare.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import median

from measure_table import Slot, spec_of

from titan_tune.domain.probe import Measurement, ProbeOutcome
from titan_tune.probe.local import LAUNCHERS, LocalRunner
from titan_tune.space.file import load_space
from titan_tune.study.plan import Plan, Ranked, make_plan

POLL_SECONDS = 0.1
PHASES = ("launch", "imports", "init", "first_step", "compile", "steps", "shutdown")
STATES = ("cold", "warm")
PEAKS = ("active_bytes", "reserved_bytes")
"""Not the device's: that counts whatever else holds memory of the GPU."""

MAX_SPREADS = 5.0
"""How many times a launcher's own spread the launchers may be apart.

Four runs that differ by chance alone, called two and two, exceed 5 in fewer than 1 of 10,000 cases where losses drift
apart as a random walk of 14 normal steps, and in 2 of 100 where all steps of a run share one normal deviation
(200,000 simulated cases each; they exceed 3 in 4 of 1,000 and 6 of 100). On H200s the largest factor seen is 3.5,
against a single pair of runs. Where kernels are deterministic the spread is 0, and so is what is allowed."""


@dataclass(frozen=True)
class Run:
    """One finished probe."""

    label: str
    launcher: str
    """What started it; not the one asked for where that could not."""
    state: str
    """Of its compile caches."""
    outcome: ProbeOutcome


@dataclass(frozen=True)
class Gap:
    """How far losses are apart: largest relative differences of any two runs."""

    all_steps: float = 0.0
    first_step: float = 0.0
    """Before anything was learned: no backward pass has a part in it."""

    def __str__(self) -> str:
        return f"{self.all_steps:.1e} ({self.first_step:.1e})"


@dataclass(frozen=True)
class Comparison:
    """Runs of one configuration and state of the caches, by both launchers."""

    label: str
    state: str
    own: dict[str, Gap]
    """By launcher: its runs among themselves."""
    between: Gap
    problems: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the report."""
    options = parse(arguments)
    plan = make_plan(load_space(options.space))
    items = sorted(plan.by_id.values(), key=lambda r: -r.predicted_tokens_per_second)[
        : options.configurations
    ]
    runs = measure(plan, items, options)
    compared = comparisons(runs)
    text = report(runs, compared, plan, options)
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0 if compared and not any(c.problems for c in compared) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--configurations", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each launcher, at least 2")
    parser.add_argument("--devices", default="0", help="device indices of one probe, e.g. 0,1")
    parser.add_argument("--runs", type=Path, default=Path("runs/launchers"))
    options = parser.parse_args(arguments)
    if options.repeats < 2:
        parser.error("--repeats: one run of a launcher has no spread")
    return options


def measure(plan: Plan, items: Sequence[Ranked], options: argparse.Namespace) -> list[Run]:
    """Every configuration, repeat, launcher and state of the caches, one at a time and the launchers in turn."""
    runs = []
    device = "cpu" if plan.space.cluster.gpu.is_cpu else "cuda"
    slot = Slot(0, options.devices)
    per_node = plan.space.cluster.gpus_per_node
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(LocalRunner(per_node, device, launcher=name)) for name in LAUNCHERS
        }
        for item, _, (name, runner) in product(items, range(options.repeats), runners.items()):
            # caches of its own for every repeat: what was compiled is part of what a launcher may change
            caches = options.runs.absolute() / f"cache-{name}-{item.candidate.config_id}-{time.time_ns()}"
            for state in STATES:
                spec = replace(spec_of(plan, item, slot, options.runs), cache_directory=caches)
                probe = runner.start(spec)
                while (outcome := probe.poll()) is None:
                    time.sleep(POLL_SECONDS)
                used = str(outcome.details.get("launcher"))
                print(
                    f"{used:10} {state} {outcome.seconds:6.1f} s  {outcome.message}  {item.label}", flush=True
                )
                runs.append(Run(item.label, used, state, outcome))
    return runs


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """One for each configuration and state of the caches, in the order they were run."""
    keys = dict.fromkeys((run.label, run.state) for run in runs)
    return [compare(*key, [run for run in runs if (run.label, run.state) == key]) for key in keys]


def compare(label: str, state: str, runs: Sequence[Run]) -> Comparison:
    """Hold the launchers' difference against each launcher's own. ``runs`` are of one configuration and state."""
    by = {name: [run.outcome for run in runs if run.launcher == name] for name in LAUNCHERS}
    few = tuple(f"{len(found)} runs by {name}" for name, found in by.items() if len(found) < 2)
    if few:
        return Comparison(label, state, {}, Gap(), few)
    outcomes = [outcome for found in by.values() for outcome in found]
    measured = {
        name: [o.measurement for o in found if o.measurement is not None] for name, found in by.items()
    }
    if len({outcome.status for outcome in outcomes}) > 1:
        return Comparison(label, state, {}, Gap(), (f"status: {_by_launcher(by, 'status')}",))
    if sum(map(len, measured.values())) < len(outcomes):
        messages = {outcome.message for outcome in outcomes}
        problems = (f"message: {_by_launcher(by, 'message')}",) if len(messages) > 1 else ()
        return Comparison(label, state, {}, Gap(), problems)
    own = {name: gap(combinations(found, 2)) for name, found in measured.items()}
    between = gap(product(measured["torchrun"], measured["preloaded"]))
    return Comparison(label, state, own, between, (*peak_problems(measured), *loss_problems(own, between)))


def gap(pairs: Iterable[tuple[Measurement, Measurement]]) -> Gap:
    """The largest relative difference of losses in any of the pairs, over the steps that both have."""
    every, first = [0.0], [0.0]
    for a, b in pairs:
        # early stops come when they come: the longer one's last steps have no counterpart
        differences = [relative(x, y) for x, y in zip(a.losses, b.losses, strict=False)]
        every += differences
        first += differences[:1]
    return Gap(max(every), max(first))


def relative(a: float, b: float) -> float:
    """Distance over the larger magnitude; 0 for two that are equal or are both not a number."""
    if a == b or (a != a and b != b):
        return 0.0
    distance = abs(a - b) / max(abs(a), abs(b))
    return distance if distance == distance else float("inf")


def loss_problems(own: dict[str, Gap], between: Gap) -> tuple[str, ...]:
    """What is wrong with the losses; empty where the launchers are no further apart than one from itself."""
    spread = max(of_one.all_steps for of_one in own.values())
    if between.all_steps <= MAX_SPREADS * spread:
        return ()
    return (f"losses: {between.all_steps:.1e} apart, {spread:.1e} within a launcher",)


def peak_problems(measured: dict[str, list[Measurement]]) -> tuple[str, ...]:
    """Each peak that is not the same in all runs; says so where it differs within a launcher already."""
    found = []
    # a fork does not touch every page of the libraries that its parent loaded: resident sets differ
    on_gpus = all(m.memory_kind == "cuda" for of_one in measured.values() for m in of_one)
    for peak in PEAKS if on_gpus else ():
        seen = {
            name: {tuple(getattr(memory, peak) for memory in m.memory) for m in of_one}
            for name, of_one in measured.items()
        }
        if len(set().union(*seen.values())) > 1:
            varying = [name for name, values in seen.items() if len(values) > 1]
            note = f" (differs among the runs of {' and of '.join(varying)})" if varying else ""
            text = " against ".join(f"{name} {sorted(values)}" for name, values in seen.items())
            found.append(f"{peak}: {text}{note}")
    return tuple(found)


def _by_launcher(by: dict[str, list[ProbeOutcome]], field: str) -> str:
    return " against ".join(f"{name} {[str(getattr(o, field)) for o in found]}" for name, found in by.items())


def report(
    runs: Sequence[Run], compared: Sequence[Comparison], plan: Plan, options: argparse.Namespace
) -> str:
    """Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchtitan"))
    cluster = plan.space.cluster
    lines = [
        "# Probes started by torchrun and preloaded",
        "",
        f"{cluster.gpus_per_node} x {cluster.gpu.name}, {versions}, {datetime.datetime.now(datetime.UTC).date()}, "
        f"`{options.space}`. Command: `python benchmarks/launchers.py {options.space} --configurations "
        f"{options.configurations} --repeats {options.repeats}`. Peak active and reserved bytes of all ranks must be",
        "equal. Losses: the largest relative difference of any step (in brackets: of the first) between any two runs;",
        f"between the launchers it may be {MAX_SPREADS:g} times that of the runs of one.",
        "",
        "| configuration | caches | tokens/s torchrun | preloaded | losses torchrun | preloaded | between | wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("torchrun", "preloaded")
    for c in compared:
        speeds = (
            _speed(run.outcome for run in runs if _key(run) == (c.label, c.state, name)) for name in names
        )
        gaps = (str(c.own[name]) if name in c.own else "" for name in names)
        between = str(c.between) if c.own else ""
        cells = (c.label, c.state, *speeds, *gaps, between, "; ".join(c.problems) or "nothing")
        lines.append(f"| {' | '.join(cells)} |")
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
                medians = (f"{median(phases.get(name, 0.0) for phases in timed):.1f}" for name in PHASES)
                whole = median(r.outcome.seconds for r in chosen)
                lines.append(f"| {launcher} | {state} | {' | '.join(medians)} | {whole:.1f} |")
    return "\n".join(lines) + "\n"


def _key(run: Run) -> tuple[str, str, str]:
    return run.label, run.state, run.launcher


def _speed(outcomes: Iterable[ProbeOutcome]) -> str:
    """Tokens/s per GPU, one number a run."""
    return ", ".join(f"{o.measurement.tokens_per_second_per_gpu:,.0f}" for o in outcomes if o.measurement)


if __name__ == "__main__":
    sys.exit(main())
