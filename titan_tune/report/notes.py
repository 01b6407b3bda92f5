"""How a study measured and what it does not show: sentences and rows, the same in every format. Plain text."""

from __future__ import annotations

import statistics

from titan_tune.report.data import ReportData
from titan_tune.report.dry_runs import stated_interval, what_it_is
from titan_tune.report.rows import Configuration
from titan_tune.report.sources import noun
from titan_tune.report.words import plural, share
from titan_tune.units import format_duration

CPU_NOTE = (
    "Measured on CPU processes: it shows that the search works and which configurations run. These speeds say"
    " nothing about GPUs."
)
TREND_NAMES = ("check", "verdict", "found")
PHASE_NAMES = ("phase", "all probes", "share", "median of a probe")


def limits(data: ReportData) -> list[str]:
    """What this study does not show."""
    found = [*_repeatability(data), *_searched(data)]
    probe = data.method.probe
    if data.method.dry_runs is not None:
        found += _dry_limits(data)
    if data.all_dry_runs:
        return found
    found.append(
        f"A probe is at most {probe.steps} steps: it shows speed, memory and the loss of its few"
        " steps. It does not show convergence, nor what happens after hours."
    )
    if probe.data == "synthetic":
        found.append(
            "Probes trained on synthetic tokens: the time to load the job's own data is not in the figures."
        )
    found.append(
        "The 95 % intervals cover the variation between the steps of a run, not that between days or machines."
    )
    if data.method.device == "cpu":
        found.append(CPU_NOTE)
    return found


def _dry_limits(data: ReportData) -> list[str]:
    """What dry runs leave open."""
    found = data.method.dry_runs
    if found is None:
        return []
    return [
        f"No run on all {plural(found.world_size, 'GPU')} confirms the throughputs of dry runs: run the best"
        " configuration and the job as it was for some steps before relying on the gain.",
        f"The interval of a dry run's throughput is {stated_interval(found.intervals)}.",
        "The losses of a dry run mean nothing: it cannot show convergence or a change of numerics, nor what a slow"
        " node, a slow link or a slow data loader costs.",
    ]


def _repeatability(data: ReportData) -> list[str]:
    repeated = data.repeated
    if not repeated and data.all_dry_runs:
        return ["Repeatability is not known: no configuration had two dry runs."]
    if not repeated:
        return ["Repeatability is not known: no configuration was measured twice."]
    spreads = [c.spread for c in repeated]
    widest: Configuration = max(repeated, key=lambda c: c.spread)
    text = (
        f"Repeatability: {plural(len(repeated), 'configuration')} ran more than once; (largest − smallest) ÷ median"
        f" of the repeated runs is {share(statistics.median(spreads))} in the median and at most {share(widest.spread)}"
        f" ({widest.label}). A difference smaller than that may be noise."
    )
    return [text]


def _searched(data: ReportData) -> list[str]:
    coverage, found = data.coverage, []
    if coverage.untried:
        learnt = "what its dry runs said" if data.all_dry_runs else "what it had measured"
        found.append(
            f"{coverage.untried:,} of {coverage.candidates:,} candidates were not run; the search expected less of them"
            f" (predicted by formula, corrected by {learnt}) or its budget ended. One of them may be faster."
        )
    names = ", ".join(axis.name for axis in data.axes)
    found.append(
        f"Only these axes were searched: {names or 'none'}. Everything else stayed as in the job, and the global"
        f" batch stayed at {plural(data.method.global_batch_size, 'sequence')}."
    )
    return found


def method_rows(data: ReportData) -> list[tuple[str, str]]:
    """How it was measured, as name and text."""
    method, probe = data.method, data.method.probe
    measured = method.measured_steps
    counted = "" if measured is None else f"; {_range(*measured)} steps measured per run"
    source = "synthetic tokens" if probe.data == "synthetic" else "the job's own data"
    times = "once" if probe.finalist_repeats == 1 else f"{probe.finalist_repeats} times"
    finals = (
        f"the job as it was and up to {probe.finalists} of the best, {times} each, in turn"
        if probe.finalists
        else "none"
    )
    dry = method.dry_runs
    rows = [
        *([] if dry is None else [("a dry run", what_it_is(dry))]),
        ("hardware" if dry is None else "the job's hardware", method.hardware),
        *([] if dry is None else [("dry runs on", dry.gpu)]),
        *([] if method.device == "cpu" else [("memory of a GPU", f"{method.capacity_gib:.1f} GiB")]),
        ("software", ", ".join(f"{name} {version}" for name, version in method.versions) or "not recorded"),
        ("job", f"{data.job}: {method.model}, {method.seq_len:,} tokens a sequence"),
        (
            "held fixed",
            f"global batch of {plural(method.global_batch_size, 'sequence')}, in every configuration",
        ),
        *_steps_rows(data, counted),
        ("data", source),
        *_figure_rows(data),
        ("finals", finals),
        (f"time in {noun(data)}s", format_duration(sum(t.seconds for t in data.trials))),
        ("study begun", method.begun),
        ("report written", method.made),
    ]
    return rows


def _steps_rows(data: ReportData, counted: str) -> list[tuple[str, str]]:
    """How long a probe or a dry run is."""
    probe, dry = data.method.probe, data.method.dry_runs
    rows = []
    if not data.all_dry_runs:
        text = f"up to {probe.steps} steps, the first {probe.warmup_steps} not counted"
        rows.append(("a probe", text + ("" if dry else counted)))
    if dry is not None and dry.warmup_steps is not None:
        text = f"the first {plural(dry.warmup_steps, 'step')} not counted"
        rows.append(("steps of a dry run", text + (counted if data.all_dry_runs else "")))
    return rows


def _figure_rows(data: ReportData) -> list[tuple[str, str]]:
    """What throughput and memory are."""
    dry = data.method.dry_runs
    rows = []
    if not data.all_dry_runs:
        rows = [
            ("throughput", "median over the measured steps, with the 95 % bootstrap interval of that median"),
            ("memory", "peak of the worst rank over a whole run"),
        ]
    if dry is not None:
        rows += [
            (
                "throughput of a dry run",
                f"compute, communication and bubble together; the interval is {stated_interval(dry.intervals)}",
            ),
            ("memory of a dry run", "peak of the worst of the ranks that ran"),
        ]
    return rows


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def trend_intro(data: ReportData) -> str:
    """What the trend checks are."""
    left_out = (
        "A check that does not concern a configuration, or for which its probe has no figures, is left out."
    )
    if data.all_dry_runs:
        return (
            "What people look at by hand in a short run, as far as a dry run shows it: it has no losses, so nothing"
            f" here says that they stay as they were. {left_out}"
        )
    dry = " A dry run has no losses." if data.has_dry_runs else ""
    return (
        "What people look at by hand in a short run. Losses are compared with the job as it was, step by step."
        f"{dry} {left_out}"
    )


def trend_sentence(data: ReportData) -> str:
    """Whether the best configuration passes its trend checks."""
    found = data.trend.best_problems
    if not found:
        return f"The best configuration passes {plural(len(data.trend.best), 'check')}."
    return "The best configuration does not pass every check: " + "; ".join(found) + "."


def trend_names(data: ReportData) -> tuple[str, ...]:
    """Headings of the table of all probes."""
    return ("#", *data.trend.checks, "configuration")


def trend_rows(data: ReportData) -> list[tuple[str, ...]]:
    """Verdicts of every measured probe."""
    names = data.trend.checks
    return [
        (f"{row.number}", *(row.grades.get(name, "–") for name in names), row.label)
        for row in data.trend.rows
    ]


def phase_rows(data: ReportData) -> list[tuple[str, str, str, str]]:
    """Phase, seconds in all, share, and the median of a probe."""
    return [
        (
            phase.name,
            format_duration(phase.seconds),
            share(phase.share),
            "" if phase.typical is None else f"{phase.typical:.1f} s",
        )
        for phase in data.phases
    ]
