"""How many probes and GPU-seconds a search needs: ours and others over measured tables; no GPU.

    python benchmarks/search_efficiency.py [--seeds 50] [--tables tests/data/tables] [-o reports/search_efficiency.md]
    python benchmarks/search_efficiency.py --synthetic 10 --seeds 3     # made-up tables, prints only

A replay: a probe costs the GPU-seconds it took when the table was measured, and answers with a bootstrap of its
measured steps (``titan_tune.study.table``). A seed is one set of such answers, and the order of those who order at
random. Every search begins with the job as it was; that probe counts. Regret is one minus the true throughput of the
best so far, as the search sees it, over that of the best in the table; true are medians of all probes of one
configuration.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from search_efficiency_chart import chart
from search_efficiency_finals import Finals, finals
from search_efficiency_rivals import STRATEGIES, Case, Strategy
from search_efficiency_synthetic import tables as made_up_tables

from titan_tune.space.file import load_space
from titan_tune.study.plan import Plan, label_of, make_plan
from titan_tune.study.pool import Observation, Pool
from titan_tune.study.propose import outlook
from titan_tune.study.prospects import pool_item
from titan_tune.study.table import Draw, MeasuredTable, TableReplay, read_table, stand_in

ROOT = Path(__file__).parents[1]
OURS, MODEL = "titan-tune", "model order"
WITHIN = 0.01
WATCHED = 0.30
"""Share of the exhaustive GPU time over which regret is shown; a run goes on beyond it until it is ``WITHIN``."""
SHARES = (0.02, 0.04, 0.06, 0.08, 0.10, 0.15, 0.20, 0.30)
PROBES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20)
LEARNED = 5
"""Probes after which predictions are held against the rest of the table."""


@dataclass(frozen=True)
class Run:
    """One search over one table; lists over its probes."""

    configs: tuple[str, ...]
    draws: tuple[Draw, ...]
    gpu_seconds: tuple[float, ...]
    """Used once each probe had ended."""
    regrets: tuple[float, ...]
    stopped: bool
    """Whether the search ended by itself."""

    def probes_within(self, within: float = WITHIN) -> float:
        """Probes until the best so far is within this share of the optimum; infinite if never."""
        return next((n for n, regret in enumerate(self.regrets, 1) if regret <= within), math.inf)

    def seconds_within(self, within: float = WITHIN) -> float:
        """GPU-seconds until then."""
        pairs = zip(self.gpu_seconds, self.regrets, strict=True)
        return next((seconds for seconds, regret in pairs if regret <= within), math.inf)

    def regret_at(self, gpu_seconds: float) -> float:
        """Regret once this much was used; 1 before the first probe ended."""
        pairs = list(zip(self.gpu_seconds, self.regrets, strict=True))
        return next((regret for seconds, regret in reversed(pairs) if seconds <= gpu_seconds), 1.0)

    def regret_after(self, probes: int) -> float:
        return self.regrets[min(probes, len(self.regrets)) - 1]


def run(case: Case, strategy: Strategy, seed: int, *, most: float = math.inf) -> Run:
    """One replay, of at most this many probes."""
    table, replay = case.table, TableReplay(case.table, seed=seed)
    first = replay.draw(case.baseline)
    configs, draws, best = [case.baseline], [first], -1.0
    seconds, regrets, regret = [], [], 1.0
    search = strategy(case, first, seed)
    following = next(search, None)
    while True:
        drawn, config = draws[-1], configs[-1]
        seconds.append((seconds[-1] if seconds else 0.0) + table.header.gpus * drawn.seconds)
        if drawn.tokens_per_second is not None and drawn.tokens_per_second > best:
            best, regret = drawn.tokens_per_second, 1.0 - (table.truth(config) or 0.0) / table.optimum
        regrets.append(regret)
        watched = seconds[-1] > WATCHED * table.exhaustive_gpu_seconds
        if following is None or len(regrets) >= most or (watched and min(regrets) <= WITHIN):
            return Run(tuple(configs), tuple(draws), tuple(seconds), tuple(regrets), following is None)
        configs.append(following)
        draws.append(replay.draw(following))
        try:
            following = search.send(draws[-1])
        except StopIteration:
            following = None


def case_of(plan: Plan, table: MeasuredTable) -> Case:
    """A table with what a search would know: what was measured and the plan does not reject is what there is to try.

    Where the job as it was has no row, a candidate near it stands in (``titan_tune.study.table.stand_in``).

    Raises:
        SystemExit: nothing is left to try.
    """
    items = {
        config: pool_item(ranked, plan) for config, ranked in plan.by_id.items() if config in table.by_config
    }
    if not items:
        raise SystemExit(f"{table.name}: no row is of a candidate of its space")
    job = table.header.baseline or (plan.baseline.candidate.config_id if plan.baseline else "")
    if job in items:
        return Case(plan, table, items, job, has_job=True)
    asked = plan.baseline.candidate.choices if plan.baseline else {}
    return Case(plan, table, items, stand_in(asked, items.values()).config_id, has_job=False)


def measured_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.jsonl")):
        table = read_table(path)
        yield case_of(make_plan(load_space(ROOT / table.header.space)), table)


# ---- what is reported


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def prediction_error(case: Case, run_: Run, probes: int) -> float:
    """Median |predicted / true - 1| over the rows that were not among the first ``probes``."""
    pool = Pool.of(list(case.items.values()))
    first = list(zip(run_.configs, run_.draws, strict=True))[:probes]
    seen = [Observation(case.items[c], d.tokens_per_second, d.seconds, d.noise) for c, d in first]
    expected, known = outlook(pool, seen).log_mean, {config for config, _ in first}
    pairs = [
        (math.exp(mean), truth)
        for item, mean in zip(pool.items, expected, strict=True)
        if item.config_id not in known and (truth := case.table.truth(item.config_id)) is not None
    ]
    return statistics.median(abs(mean / truth - 1.0) for mean, truth in pairs)


def shown(value: float, digits: int = 0) -> str:
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


def reach_row(name: str, case: Case, runs: Sequence[Run]) -> str:
    probes, seconds = [r.probes_within() for r in runs], [r.seconds_within() for r in runs]
    share = 100 / case.table.exhaustive_gpu_seconds
    cells = [
        name,
        f"{shown(quantile(probes, 0.5))} / {shown(quantile(probes, 0.9))}",
        f"{shown(quantile(seconds, 0.5))} / {shown(quantile(seconds, 0.9))}",
        f"{shown(share * quantile(seconds, 0.5), 1)} / {shown(share * quantile(seconds, 0.9), 1)}",
        f"{100 * sum(map(math.isfinite, probes)) / len(probes):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def curve_rows(results: Mapping[str, Sequence[Run]], case: Case) -> Iterator[str]:
    whole = case.table.exhaustive_gpu_seconds
    yield "| % of the exhaustive GPU time | " + " | ".join(f"{100 * share:.0f}" for share in SHARES) + " |"
    yield "|---" * (len(SHARES) + 1) + "|"
    for name, runs in results.items():
        medians = (quantile([r.regret_at(share * whole) for r in runs], 0.5) for share in SHARES)
        yield f"| {name} | " + " | ".join(f"{100 * m:.1f}" if m < 1 else "" for m in medians) + " |"


def probe_rows(results: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    yield "| probes | " + " | ".join(map(str, PROBES)) + " |"
    yield "|---" * (len(PROBES) + 1) + "|"
    for name, runs in results.items():
        medians = (quantile([r.regret_after(n) for r in runs], 0.5) for n in PROBES)
        yield f"| {name} | " + " | ".join(f"{100 * m:.1f}" for m in medians) + " |"


def replays(case: Case, seeds: int) -> dict[str, list[Run]]:
    """Every search over one table, with every seed."""
    return {name: [run(case, search, seed) for seed in range(seeds)] for name, search in STRATEGIES.items()}


def curves(case: Case, results: Mapping[str, Sequence[Run]]) -> str:
    """The chart of a table."""
    whole = case.table.exhaustive_gpu_seconds
    steps = [place / 200 * WATCHED for place in range(201)]
    found = {}
    for name, runs in results.items():
        medians = [(100 * s, quantile([r.regret_at(s * whole) for r in runs], 0.5)) for s in steps]
        found[name] = [(share, 100 * regret) for share, regret in medians if regret < 1.0]
    highest = max(curve[0][1] for curve in found.values() if curve)
    return chart(found, title=case.table.name, last=100 * WATCHED, highest=5 * math.ceil(highest / 5))


def section(case: Case, results: Mapping[str, Sequence[Run]], image: str | None = None) -> Iterator[str]:
    """A table's part of the report."""
    table, header, seeds = case.table, case.table.header, len(results[OURS])
    ran = [config for config in table.by_config if table.truth(config) is not None]
    near = sum((table.truth(config) or 0.0) >= (1 - WITHIN) * table.optimum for config in ran)
    best = max(ran, key=lambda config: table.truth(config) or 0.0)
    yield from (
        f"## {table.name}",
        "",
        f"`{header.space}`: {header.gpus} x {header.gpu}, torch {header.torch}, {header.date}. {len(case.items)} of"
        f" {len(case.plan.by_id)} candidates were measured, {len(ran)} ran, {near} within {WITHIN:.0%} of the best"
        f" ({', '.join(table.by_config[best][0].choices.values())}; {table.optimum:,.0f} tokens/s per GPU)."
        f" Measuring all of them once took {table.exhaustive_gpu_seconds:,.0f} GPU-seconds. Between runs of"
        f" one configuration: {noise_of(table)}.",
        "",
        *beginning(case),
        f"Until within {WITHIN:.0%} of the optimum, median / 90th percentile of {seeds} seeds:",
        "",
        "| search | probes | GPU-seconds | % of exhaustive | seeds that get there, % |",
        "|---|---|---|---|---|",
        *(reach_row(name, case, runs) for name, runs in results.items()),
        "",
        *comparison(results),
        least(case),
        "",
        "Median regret, %, against GPU time and against probes:",
        "",
        *([f"![regret against GPU time]({image})", ""] if image else []),
        *curve_rows(results, case),
        "",
        *probe_rows(results),
        "",
        *ours_in_full(case, results[OURS]),
        "",
    )


def noise_of(table: MeasuredTable) -> str:
    """What is known of the spread between runs of one configuration, in words."""
    if table.repeat_noise is not None:
        return f"{100 * table.repeat_noise:.1f} %"
    if table.header.run_noise is not None:
        return f"{100 * table.header.run_noise:.1f} % (no repeats here: searches that ran four configurations twice)"
    return "not known: no repeats"


def beginning(case: Case) -> Iterator[str]:
    """What a reader has to know where the table is incomplete."""
    if len(case.items) < len(case.plan.by_id):
        yield (
            f"**{len(case.items)} of {len(case.plan.by_id)} measured**: the searches choose among these, and the"
            " optimum is the best of these; the exhaustive GPU time is theirs too, so it is too small. What was"
            " measured was not chosen at random: compile mode by compile mode, best prediction first."
        )
        yield ""
    if not case.has_job:
        label = label_of(case.items[case.baseline].choices)
        yield (
            f"The job as it was has no row. In its stead every search begins with {label}: of the measured"
            " candidates the one that differs from the job on the fewest axes, the slowest predicted of several."
        )
        yield ""


def comparison(results: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    def middle(name: str) -> float:
        return quantile([r.seconds_within() for r in results[name]], 0.5)

    rivals = [name for name in results if name not in (OURS, MODEL)]
    best = min(rivals, key=middle)
    yield (
        f"Median GPU-seconds of titan-tune over those of the best search without its step-time model ({best}):"
        f" {middle(OURS) / middle(best):.2f}; over those of its own model's order: {middle(OURS) / middle(MODEL):.2f}."
    )


def least(case: Case) -> str:
    """What no search can undercut."""
    table = case.table
    near = {c for c in table.by_config if (table.truth(c) or 0.0) >= (1 - WITHIN) * table.optimum}
    needed = {case.baseline: table.by_config[case.baseline][0].seconds}
    if case.baseline not in near:
        quickest = min(near, key=lambda config: table.by_config[config][0].seconds)
        needed[quickest] = table.by_config[quickest][0].seconds
    seconds = table.header.gpus * sum(needed.values())
    share = 100 * seconds / table.exhaustive_gpu_seconds
    return (
        f"The least that a search can need which begins with the job and then guesses right: {len(needed)} probes,"
        f" {seconds:,.0f} GPU-seconds, {share:.1f} % of the exhaustive."
    )


def ours_in_full(case: Case, runs: Sequence[Run]) -> Iterator[str]:
    table = case.table
    ended: list[Finals] = [finals(case, r.configs, r.draws, seed) for seed, r in enumerate(runs)]
    before = [prediction_error(case, r, 0) for r in runs]
    one = [prediction_error(case, r, 1) for r in runs]
    after = [prediction_error(case, r, LEARNED) for r in runs]
    share = 100 / table.exhaustive_gpu_seconds
    total = [r.gpu_seconds[-1] + f.gpu_seconds for r, f in zip(runs, ended, strict=True)]
    yield (
        f"titan-tune until it stops by itself: {quantile([len(r.configs) for r in runs], 0.5)} probes"
        f" (90th percentile {quantile([len(r.configs) for r in runs], 0.9)}), then"
        f" {quantile([f.probes for f in ended], 0.5)} in the finals (90th percentile"
        f" {quantile([f.probes for f in ended], 0.9)}); {share * quantile(total, 0.5):.1f} % of the exhaustive GPU"
        f" time in all. Regret of the winner: median {100 * quantile([f.regret for f in ended], 0.5):.2f} %, 90th"
        f" percentile {100 * quantile([f.regret for f in ended], 0.9):.2f} %."
    )
    yield ""
    yield (
        f"Predicted against true tokens/s of what was not measured yet, median error: {100 * before[0]:.1f} % before"
        f" any probe, {100 * quantile(one, 0.5):.1f} % after the job as it was,"
        f" {100 * quantile(after, 0.5):.1f} % after {LEARNED} probes."
    )


HEAD = """# Search efficiency

Written by `python benchmarks/search_efficiency.py --seeds {seeds}`: searches replayed over tables measured
on H200s ([tests/data/tables](../tests/data/tables)); no GPU was used for this report. A probe costs what it cost
when the table was measured; its throughput is a bootstrap of the measured steps, with the spread between repeats
where there are some. All searches know the same feasible candidates and begin with the job as it was, which
counts as a probe. Made-up tables that the step-time model is wrong about are in
[search_efficiency_synthetic.md](search_efficiency_synthetic.md).

- **titan-tune**: `FeasibleSampler` with the step-time model, the memory estimate and a guess of every probe's duration.
- **model order**: in the manner of DeepSpeed's model-based autotuning: best prediction first, until five in a row are
  no improvement. DeepSpeed fits its model to finished experiments; here the prediction is titan-tune's, so the row
  shows what learning from probes adds, and is no order that anybody has without titan-tune.
- **one axis at a time**: AC, then compile, float8, local batch, layouts; the best is kept; again until nothing changes.
- **Optuna TPE**: default settings over the axes; what is infeasible or known is asked again at no cost.
- **random**, **grid** (in the order of the file): without repetition.

"""


def write_report(cases: Sequence[Case], seeds: int, path: Path) -> None:
    """The report, and a chart a table beside it."""
    lines = [HEAD.format(seeds=seeds)]
    for case in cases:
        results, image = replays(case, seeds), f"{path.stem}_{case.table.name}.svg"
        path.with_name(image).write_text(curves(case, results), encoding="utf-8")
        lines += section(case, results, image)
    path.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--tables", type=Path, default=ROOT / "tests" / "data" / "tables")
    parser.add_argument(
        "--synthetic", type=int, default=0, help="made-up tables a space, instead of measured"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "reports" / "search_efficiency.md")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.synthetic:
        for plan, table in made_up_tables(draws=options.synthetic):
            case = case_of(plan, table)
            print("\n".join(section(case, replays(case, options.seeds))), flush=True)
        return
    cases = list(measured_cases(options.tables))
    if not cases:
        raise SystemExit(f"{options.tables}: no *.jsonl")
    write_report(cases, options.seeds, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
