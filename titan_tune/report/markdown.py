"""The report as Markdown, to be committed: the same sections as the page, with tables for charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import titan_tune
from titan_tune.domain.probe import Origin
from titan_tune.report import notes, sources, words
from titan_tune.report.data import ReportData
from titan_tune.report.markup import clean
from titan_tune.report.rows import TrialRow
from titan_tune.report.words import percent, tokens
from titan_tune.units import format_duration

MARKER = "<!-- titan-tune report"
_SPECIAL = re.compile(r"[\\`*\[\]<>|~&!$]|(?<![^\W_])_|_(?![^\W_])")
_BLOCK_START = re.compile(r"^(?:(\d{1,9})([.)])(?=\s|$)|([-+#=]))")
_LINK = re.compile(r"(?i)\b(https?|ftp|mailto|xmpp):|\b(www)\.")


def render_markdown(data: ReportData) -> str:
    """The whole file."""
    titles = sources.titles(data)
    sections = [
        ("The answer", _answer(data)),
        ("The price", _price(data)),
        (titles["configurations"], _configurations(data)),
        ("Progress", _progress(data)),
        (titles["predictions"], _predictions(data)),
        ("The effect of each axis", _effects(data)),
        ("All trials", _trials(data)),
        ("Does it train soundly", _trend(data)),
        (f"Rejected before any {data.worker}", _rejected(data)),
        ("What failed", _failed(data)),
        *([("Where the time went", _phases(data))] if data.phases else []),
        (titles["method"], _method(data)),
        ("Limits", [bullets(notes.limits(data))]),
    ]
    method = data.method
    blocks = [
        f"{MARKER} {titan_tune.__version__} -->",
        f"# {text(words.headline(data))}",
        text(
            f"{data.job} {sources.preposition(data)} {method.hardware}, study {data.study}, begun {method.begun},"
            f" reported {method.made}."
        ),
    ]
    for title, parts in sections:
        blocks += [f"## {title}", *parts]
    return "\n\n".join(blocks) + "\n"


# ---- sections


def _answer(data: ReportData) -> list[str]:
    found = data.answer
    if found is None:
        why = [text(f"{t.status}: {t.message}") for t in data.failures[:1]]
        return [text(words.no_winner(data)), *why]
    bounds = f"{tokens(found.interval[0])} to {tokens(found.interval[1])}"
    interval = f"{sources.interval_name(found.origin)} {bounds}"
    note = words.interval_note(found)
    facts = [
        (f"throughput, {found.origin}", f"{tokens(found.tokens_per_second)} {words.unit(data)}, {interval}"),
        *([("its interval", note)] if note else []),
        (f"gain, {found.gain_origin}", words.gain_sentence(data, found)),
        ("runs", words.runs_sentence(found)),
        ("peak memory, measured" if found.memory.origin is Origin.MEASURED else "peak memory",
         words.memory_sentence(data, found.memory)),
        ("numerics", words.numerics_sentence(found)),
    ]  # fmt: skip
    note = sources.dry_run_note(data)
    parts = [*([text(note)] if note else []), table(("", ""), facts)]
    if found.choices:
        parts += ["### The configuration", table(("axis", "value"), found.choices)]
    if found.keys:
        rows = [(c.name, c.before or "not known", c.after) for c in found.keys]
        parts += ["### What changes in the job file", table(("key", "as it was", "best"), rows)]
    return [*parts, "### Export it", fenced(data.export_command)]


def _price(data: ReportData) -> list[str]:
    formula = words.break_even_formula(data)
    sentences = [text(words.price_sentence(data)), text(words.break_even_sentence(data))]
    return [*sentences, fenced(formula)] if formula else sentences


def _configurations(data: ReportData) -> list[str]:
    if not data.configurations:
        return [sources.no_configuration(data)]
    rows = [
        (
            tokens(c.tokens_per_second), f"{tokens(c.interval[0])} to {tokens(c.interval[1])}",
            "" if c.gain is None or c.is_baseline else percent(c.gain), f"{c.memory.active_gib:.1f}",
            str(c.runs), ", ".join(c.marks), c.label,
        )
        for c in data.configurations
    ]  # fmt: skip
    kind = "resident set GiB" if data.worker == "process" else "active GiB"
    names = (words.unit(data), sources.interval_heading(data), "gain", kind, "runs", "", "configuration")
    note = words.order_note(data)
    intro = f"{sources.figures(data).capitalize()}; fastest first."
    return [intro, *_common(data), table(names, rows), *([text(note)] if note else [])]


def _progress(data: ReportData) -> list[str]:
    rows, best = [], None
    for step in data.steps:
        if step.best_so_far is not None and step.best_so_far != best:
            best = step.best_so_far
            probe = f"#{step.number}" + (f" ({step.origin})" if step.origin is Origin.DRY_RUN else "")
            rows.append((f"{step.gpu_minutes:.1f}", tokens(best), probe, step.label))
    if not rows:
        return [
            sources.no_configuration(data) if data.all_dry_runs else "No probe was measured while exploring."
        ]
    names = (words.minute_unit(data), f"best so far, {words.unit(data)}", sources.noun(data), "configuration")
    intro = f"{sources.figures(data).capitalize()}; the best of the exploring {sources.noun(data)}s, each time it rose."
    return [intro, table(names, rows)]


def _predictions(data: ReportData) -> list[str]:
    sentences = [words.error_sentence(data, memory=False), words.error_sentence(data, memory=True)]
    parts = [bullets([*sentences, *filter(None, [words.surprise_sentence(data)])])]
    for comparison, name, is_memory in (
        (data.throughput, words.unit(data), False),
        (data.memory, "peak active GiB", True),
    ):
        rows = [
            (f"{p.predicted:,.1f}", f"{p.measured:,.1f}", percent(p.predicted / p.measured - 1.0),
             *((sources.point_source(p, memory=is_memory),) if data.has_dry_runs else ()), p.label)
            for p in comparison.points
        ]  # fmt: skip
        if rows and data.has_dry_runs:
            heads = (f"{name}, by formula", "found", "difference", "found by", "configuration")
            parts.append(table(heads, rows))
        elif rows:
            parts.append(table((f"{name}, predicted", "measured", "error", "configuration"), rows))
    return parts


def _effects(data: ReportData) -> list[str]:
    if not data.effects:
        return [words.effects_sentence(data)]
    rows = [
        (
            e.axis, sources.effect_step(e), percent(e.median_ratio - 1.0),
            f"{percent(e.lowest_ratio - 1.0)} to {percent(e.highest_ratio - 1.0)}",
            words.gib_change(e.median_memory_gib), str(e.pairs),
        )
        for e in data.effects
    ]  # fmt: skip
    names = ("axis", "step", "throughput", "range", "peak memory", "pairs")
    return [f"{sources.figures(data).capitalize()}. {words.effects_sentence(data)}", table(names, rows)]


def _trials(data: ReportData) -> list[str]:
    if not data.trials:
        return ["No probe has finished."]
    names = (
        "#",
        "role",
        "status",
        "tokens/s",
        "duration",
        "first step",
        "last loss",
        "retries",
        "folder",
        "configuration",
    )
    return [*_common(data), table(names, [_trial(t) for t in data.trials])]


def _trial(t: TrialRow) -> Sequence[str]:
    return (
        str(t.number), t.role, t.ended, "" if t.tokens_per_second is None else tokens(t.tokens_per_second),
        format_duration(t.seconds), "" if t.time_to_first_step is None else f"{t.time_to_first_step:.1f} s",
        "" if t.final_loss is None else f"{t.final_loss:.4f}", "" if t.alloc_retries is None else str(t.alloc_retries),
        t.folder, t.label,
    )  # fmt: skip


def _rejected(data: ReportData) -> list[str]:
    parts = [text(words.funnel_sentence(data))]
    if data.coverage.rejected:
        rows = [(r.rule, f"{r.count:,}", r.example) for r in data.coverage.rejected]
        parts.append(table(("rule", "count", "for example"), rows))
    return parts


def _failed(data: ReportData) -> list[str]:
    rows = [(str(t.number), t.role, t.ended, t.message, t.label) for t in data.failures]
    parts = [
        table(("#", "role", "status", "why", "configuration"), rows) if rows else words.no_failures(data)
    ]
    warned = [f"#{number}: {warning}" for number, warning in data.warnings]
    return [*parts, f"### Warnings of {sources.noun(data)}s", bullets(warned)] if warned else parts


def _trend(data: ReportData) -> list[str]:
    if not data.trend.rows:
        return [sources.no_configuration(data)]
    parts = [notes.trend_intro(data)]
    if data.trend.best:
        rows = [(check.name, str(check.grade), check.text) for check in data.trend.best]
        parts += [text(notes.trend_sentence(data)), table(notes.TREND_NAMES, rows)]
    parts += [
        f"### {sources.titles(data)['trend']}",
        *_common(data),
        table(notes.trend_names(data), notes.trend_rows(data)),
    ]
    found = [f"#{row.number}: {problem}" for row in data.trend.rows for problem in row.problems]
    return [*parts, bullets(found)] if found else parts


def _phases(data: ReportData) -> list[str]:
    return [
        f"Wall time of the {sources.noun(data)}s, measured.",
        table(notes.PHASE_NAMES, notes.phase_rows(data)),
    ]


def _method(data: ReportData) -> list[str]:
    parts = [table(("", ""), notes.method_rows(data))]
    if data.axes:
        rows = [
            (a.name, ", ".join(a.labels), "changes numerics" if a.changes_numerics else "") for a in data.axes
        ]
        parts.append(table(("axis", "values", ""), rows))
    return parts


def _common(data: ReportData) -> list[str]:
    same = words.common_sentence(data)
    return [text(same)] if same else []


# ---- pieces


def inline(value: str) -> str:
    """One line of plain text, whatever the value holds: no markup, no HTML, no links, no table borders."""
    line = " ".join(clean(value).split())
    line = _SPECIAL.sub(lambda match: f"\\{match[0]}", line)
    return _LINK.sub(lambda match: f"{match[1]}\\:" if match[1] else f"{match[2]}\\.", line)


def text(value: str) -> str:
    """A paragraph of plain text that starts no list and no heading."""
    return _BLOCK_START.sub(lambda m: f"{m[1]}\\{m[2]}" if m[1] else f"\\{m[3]}", inline(value))


def bullets(items: Iterable[str]) -> str:
    """A list of plain lines."""
    return "\n".join(f"- {text(item)}" for item in items)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain cells."""
    lines = [names, *rows]
    rendered = ["| " + " | ".join(inline(cell) for cell in line) + " |" for line in lines]
    return "\n".join([rendered[0], "|" + " --- |" * len(names), *rendered[1:]])


def fenced(value: str) -> str:
    """A code block that the value cannot end."""
    value = clean(value)
    longest = max((len(run) for run in re.findall("`+", value)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{value}\n{fence}"
