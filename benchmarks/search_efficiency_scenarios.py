"""Searches on tables unlike those that were measured: the step-time model is wrong in known ways; no GPU.

    python benchmarks/search_efficiency_scenarios.py [--seeds 3] [--only NAME ...] [--searches NAME ...] [-o REPORT.md]

See search_efficiency_worlds.py for the tables and search_efficiency.py for the searches and what is counted. A search
is given ``MOST`` probes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from search_efficiency import MODEL, OURS, quantile, run
from search_efficiency_rivals import STRATEGIES
from search_efficiency_worlds import FIELD, SCENARIOS, Scenario, cases

ROOT = Path(__file__).parents[1]
MOST = 40
NEAR = (0.01, 0.03)


@dataclass(frozen=True)
class Reach:
    """What one search on one table needed until within a share of the optimum; infinite if it never got there."""

    probes: float
    share: float
    """Of the exhaustive GPU time, %."""


Found = Mapping[float, Sequence[Reach]]
"""By how near."""


def replay(scenario: Scenario, searches: Sequence[str], seeds: int) -> Mapping[str, Found]:
    """Every search on every table of a scenario."""
    found: dict[str, dict[float, list[Reach]]] = {name: {near: [] for near in NEAR} for name in searches}
    for case in cases(scenario):
        whole = case.table.exhaustive_gpu_seconds
        for name in searches:
            for seed in range(seeds):
                done = run(case, STRATEGIES[name], seed, most=MOST)
                for near in NEAR:
                    reach = Reach(done.probes_within(near), 100 * done.seconds_within(near) / whole)
                    found[name][near].append(reach)
    return found


def pair(values: Sequence[float], digits: int) -> str:
    """Median and 90th percentile."""
    both = (quantile(values, 0.5), quantile(values, 0.9))
    return " / ".join("never" if math.isinf(value) else f"{value:.{digits}f}" for value in both)


def cells(found: Found, nears: Sequence[float] = NEAR) -> list[str]:
    shown = []
    for near in nears:
        reached = found[near]
        never = sum(math.isinf(r.probes) for r in reached) / len(reached)
        shown += [
            pair([r.probes for r in reached], 0),
            pair([r.share for r in reached], 1),
            f"{100 * never:.0f}",
        ]
    return shown


def middle(found: Found) -> float:
    return quantile([r.share for r in found[NEAR[0]]], 0.5)


def line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def overall(results: Sequence[Mapping[str, Found]]) -> Iterator[str]:
    heads = [f"{what}, {near:.0%}" for near in NEAR for what in ("probes", "GPU time", "never")]
    yield line(["search", *heads])
    yield "|---" * (len(heads) + 1) + "|"
    for name in results[0]:
        pooled = {near: [reach for result in results for reach in result[name][near]] for near in NEAR}
        yield line([name, *cells(pooled)])


def by_scenario(results: Mapping[Scenario, Mapping[str, Found]]) -> Iterator[str]:
    yield line(["the model is wrong: how", "search", "probes, 1%", "GPU time, 1%", "never, 1%", "probes, 3%"])
    yield "|---" * 6 + "|"
    for scenario, result in results.items():
        rivals = [name for name in result if name not in (OURS, MODEL)]
        names = [name for name in (OURS, MODEL) if name in result]
        names += [min(rivals, key=lambda name: middle(result[name]))] if rivals else []
        for place, name in enumerate(names):
            said = (scenario.__doc__ or "") if not place else ""
            yield line([said, name, *cells(result[name])[:4]])


HEAD = """# Search efficiency where the step-time model is wrong

**Synthetic: nothing in this report was measured.** Written by
`python benchmarks/search_efficiency_scenarios.py --seeds {seeds}`: {tables} tables, {scenarios} ways to be wrong
on each of {spaces} spaces ({names}). A table's truth is the step-time model with small errors (2 % a label, 0.7 % a
pair of labels and a candidate) and one large one, aimed at what the model thinks best
(`benchmarks/search_efficiency_worlds.py`); a space that an error says nothing to, such as one GPU's pipelines, keeps
the small ones. The searches are those of [search_efficiency.md](search_efficiency.md);
each is given {most} probes, the job as it was among them, {seeds} times a table. Probes, and % of the GPU time of
measuring all once, until within 1 % and 3 % of the optimum (median / 90th percentile), and the share of
replays that never get there, %, whether the search stopped by itself, came to its end or had no probes left.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of scenarios")
    parser.add_argument("--searches", nargs="*", default=list(STRATEGIES))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    results: dict[Scenario, Mapping[str, Found]] = {}
    for scenario in SCENARIOS:
        if options.only and scenario.__name__ not in options.only:
            continue
        results[scenario] = replay(scenario, options.searches, options.seeds)
        for name, found in results[scenario].items():
            print(f"{scenario.__name__:26} {name:20} {'  |  '.join(cells(found))}", flush=True)
    print("\n".join(overall(list(results.values()))))
    if options.output:
        head = HEAD.format(
            seeds=options.seeds,
            tables=len(results) * len(FIELD),
            scenarios=len(results),
            spaces=len(FIELD),
            names="; ".join(FIELD),
            most=MOST,
        )
        rows = [*overall(list(results.values())), "", "## By what is wrong", "", *by_scenario(results)]
        options.output.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
