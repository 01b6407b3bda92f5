"""The report as one self-contained HTML page: no script, no network, readable on a phone and on paper."""

from __future__ import annotations

from titan_tune.domain.probe import Origin
from titan_tune.report import charts, notes, sources, words
from titan_tune.report.answer import Answer
from titan_tune.report.blocks import facts, head, source, table, tile
from titan_tune.report.data import ReportData
from titan_tune.report.markup import Markup, el, join
from titan_tune.report.pieces import NOTHING, changes, choices, common, legend, maybe
from titan_tune.report.rows import Axis, Configuration, TrialRow
from titan_tune.report.words import percent, tokens
from titan_tune.units import format_duration

GENERATOR = "titan-tune report"


def render_html(data: ReportData) -> str:
    """The whole page."""
    titles = sources.titles(data)
    sections: list[tuple[str, str, list[str]]] = [
        ("answer", "The answer", _answer(data)),
        ("price", "The price", _price(data)),
        ("configurations", titles["configurations"], _configurations(data)),
        ("progress", "Progress", _progress(data)),
        ("predictions", titles["predictions"], _predictions(data)),
        ("axes", "The effect of each axis", _effects(data)),
        ("trials", "All trials", _trials(data)),
        ("trend", "Does it train soundly", _trend(data)),
        ("rejected", f"Rejected before any {data.worker}", _rejected(data)),
        ("failed", "What failed", _failed(data)),
        *([("time", "Where the time went", _phases(data))] if data.phases else []),
        ("method", titles["method"], _method(data)),
        ("limits", "Limits", [el("ul", *(el("li", text) for text in notes.limits(data)))]),
    ]
    nav = el("nav", *(el("a", title, href=f"#{name}") for name, title, _ in sections), aria_label="Contents")
    place = f"{sources.preposition(data)} {data.method.hardware}"
    about = f"{data.job} {place} · study {data.study} · {data.method.made[:10]}"
    body = el(
        "main",
        el("header", el("p", about), el("h1", words.headline(data)), nav),
        *(el("section", el("h2", title), *blocks, id=name) for name, title, blocks in sections),
    )
    start = head(f"{data.study}: titan-tune report", generator=GENERATOR)
    return f"<!doctype html>\n{el('html', start, el('body', body), lang='en')}\n"


def _answer(data: ReportData) -> list[str]:
    found = data.answer
    if found is None:
        why = [el("p", f"{t.status}: {t.message}") for t in data.failures[:1]]
        return [el("p", words.no_winner(data), class_="note"), *why]
    note = sources.dry_run_note(data)
    interval = words.interval_note(found)
    blocks: list[str] = [
        *([el("p", source(str(Origin.DRY_RUN)), " ", note, class_="note")] if note else []),
        _tiles(data, found),
        *([el("p", interval)] if interval else []),
        el("p", words.gain_sentence(data, found)),
        el("p", words.runs_sentence(found)),
        el("p", "Peak memory: ", words.memory_sentence(data, found.memory)),
        el("p", words.numerics_sentence(found), class_="note" if found.changes_numerics else None),
    ]
    if found.choices:
        blocks += [el("h3", "The configuration"), facts(found.choices)]
    if found.keys:
        blocks += [el("h3", "What changes in the job file"), changes(found.keys)]
    return [*blocks, el("h3", "Export it"), el("pre", el("code", data.export_command))]


def _tiles(data: ReportData, found: Answer) -> Markup:
    low, high = found.interval
    tiles = [
        tile(
            words.unit(data),
            str(found.origin),
            tokens(found.tokens_per_second),
            f"{tokens(low)} to {tokens(high)}",
        )
    ]
    if found.gain is not None and found.gain_interval is not None and not found.is_baseline:
        bounds = f"{percent(found.gain_interval[0])} to {percent(found.gain_interval[1])}"
        tiles.append(tile("over the job as it was", str(found.gain_origin), percent(found.gain), bounds))
    memory = found.memory
    if memory.kind == "rss":
        tiles.append(tile("peak memory", "measured", f"{memory.active_gib:.2f} GiB", "resident set size"))
    else:
        more = f"{memory.device_gib:.1f} of {data.method.capacity_gib:.1f} GiB used on the device"
        if memory.origin is Origin.DRY_RUN:
            more = f"on the ranks that ran; with the model's part {more}"
        tiles.append(tile("peak active memory", "measured", f"{memory.active_gib:.1f} GiB", more))
    spent, probes = words.hours(data.price.gpu_hours), words.plural(data.price.probes, sources.noun(data))
    tiles.append(tile(f"{words.hour_unit(data)} used", "measured", spent, probes))
    return el("div", *tiles, class_="tiles")


def _price(data: ReportData) -> list[str]:
    sentences = [el("p", words.price_sentence(data)), el("p", words.break_even_sentence(data))]
    formula = words.break_even_formula(data)
    if not formula:
        return list(sentences)
    why = (
        "What took an hour takes 1 ÷ (1 + gain) of an hour now; what that saves on all of the job's devices is set"
        " against what the search used. "
    )
    return [*sentences, el("pre", formula), el("p", why, source("computed"), class_="soft")]


def _configurations(data: ReportData) -> list[str]:
    if not data.configurations:
        return [el("p", sources.no_configuration(data))]
    scale = charts.configuration_scale(data.configurations)
    base = data.answer.baseline_tokens_per_second if data.answer else None
    axis = el(
        "li", el("span", words.unit(data), class_="name soft"), charts.configuration_axis(scale), el("span")
    )
    intro = (
        f"{'' if data.all_dry_runs else 'Median '}{words.unit(data)} with its {sources.interval_heading(data)},"
        " fastest first. The axis does not start at zero. "
    )
    keys = [
        *([] if data.all_dry_runs else [("final", "measured again in the finals")]),
        *([] if data.all_dry_runs else [("probe", "measured while exploring")]),
        *([("dry", "dry run")] if data.has_dry_runs else []),
        *([("baseline", "the job as it was (dashed line)")] if base is not None else []),
        ("dry best" if data.all_dry_runs else "final best", "the best"),
    ]
    note = words.order_note(data)
    return [
        el("p", intro, _sources(data)),
        *common(data),
        legend(keys),
        el("ul", axis, *(_configuration(c, scale, base) for c in data.configurations), class_="rows"),
        *([el("p", note, class_="soft")] if note else []),
    ]


def _sources(data: ReportData) -> Markup:
    return join([source(kind) for kind in sources.source_tags(data)], " ")


def _configuration(config: Configuration, scale: charts.Scale, base: float | None) -> Markup:
    tags = [el("span", mark, class_=f"tag {mark.split()[0]}") for mark in config.marks]
    gain = "" if config.gain is None or config.is_baseline else f" ({percent(config.gain)})"
    bounds = f"{tokens(config.interval[0])} to {tokens(config.interval[1])}"
    return el(
        "li",
        el("span", choices(config.choices), " ", join(tags, " "), class_="name"),
        el("span", charts.configuration_row(config, scale, base), class_="plot"),
        el("span", tokens(config.tokens_per_second), gain, el("small", bounds), class_="value"),
        class_="best" if config.is_best else None,
    )


def _progress(data: ReportData) -> list[str]:
    if not data.steps:
        return [el("p", "No probe has finished.")]
    intro = (
        f"Throughput ({words.unit(data)}) of each {sources.noun(data)} over the {words.minute_unit(data)} spent when it"
        " ended; the line is the best of the exploring ones so far. "
    )
    keys = [
        *([] if data.all_dry_runs else [("probe", "exploring")]),
        *([("dry", "dry run")] if data.has_dry_runs else []),
        ("baseline", "the job as it was"),
        *([] if data.all_dry_runs else [("final", "finals")]),
        ("failed", "no throughput" if data.has_dry_runs else "not measured"),
    ]
    return [el("p", intro, _sources(data)), legend(keys), charts.progress(data)]


def _predictions(data: ReportData) -> list[str]:
    panels = []
    for title, comparison, is_memory in (
        (f"Throughput, {words.unit(data)}", data.throughput, False),
        ("Peak active memory, GiB", data.memory, True),
    ):
        chart = [charts.scatter(comparison, label=title, is_memory=is_memory)] if comparison.points else []
        sentence = el("p", words.error_sentence(data, memory=is_memory))
        panels.append(el("div", el("h3", title), *chart, sentence))
    memory = "; memory of a dry run is measured, on the ranks that ran" if data.has_dry_runs else ""
    across = el("p", "Across: ", source("predicted"), f" by formula, before any {sources.noun(data)}. Up: ",
                _sources(data), f"{memory}. On the dashed line both are equal.")  # fmt: skip
    surprise = words.surprise_sentence(data)
    return [across, el("div", *panels, class_="pair"), *([el("p", surprise)] if surprise else [])]


def _effects(data: ReportData) -> list[str]:
    if not data.effects:
        return [el("p", words.effects_sentence(data))]
    scale = charts.effect_scale(data.effects)
    rows = [
        (
            e.axis, sources.effect_step(e), percent(e.median_ratio - 1.0), str(e.pairs),
            f"{percent(e.lowest_ratio - 1.0)} to {percent(e.highest_ratio - 1.0)}",
            words.gib_change(e.median_memory_gib), el("td", charts.effect_row(e, scale), class_="plot"),
        )
        for e in data.effects
    ]  # fmt: skip
    names = ("axis", "step", "change", "pairs", "range", "peak memory", "throughput; dashed: no change")
    return [el("p", words.effects_sentence(data), " ", _sources(data)), table(names, rows)]


def _trials(data: ReportData) -> list[str]:
    if not data.trials:
        return [el("p", "No probe has finished.")]
    intro = (
        f"One line a {sources.noun(data)}, oldest first. tokens/s per {data.worker}; first step: from launch to the"
        " end of step 1, compilation included; retries: of the allocator; folders are under the study's "
    )
    names = ("#", "role", "status", "tokens/s", "duration", "first step", "last loss", "retries", "configuration",
             "folder")  # fmt: skip
    return [
        el("p", intro, el("code", "trials/"), ". ", _sources(data)),
        *common(data),
        table(names, [_trial(t) for t in data.trials]),
    ]


def _trial(t: TrialRow) -> tuple[str, ...]:
    return (
        str(t.number),
        t.role,
        t.ended,
        maybe(t.tokens_per_second, tokens),
        format_duration(t.seconds),
        maybe(t.time_to_first_step, lambda seconds: f"{seconds:.1f} s"),
        maybe(t.final_loss, lambda loss: f"{loss:.4f}"),
        maybe(t.alloc_retries, str),
        el("td", choices(t.choices), class_="wide"),
        el("td", el("code", t.folder), class_="folder"),
    )


def _rejected(data: ReportData) -> list[str]:
    funnel = el("p", words.funnel_sentence(data))
    rows = [
        (el("td", el("code", r.rule)), f"{r.count:,}", el("td", r.example or NOTHING, class_="wide"))
        for r in data.coverage.rejected
    ]
    if not rows:
        return [funnel]
    by = el("p", "By rule and by formula; nothing in this table ran. ", source("predicted"), class_="soft")
    return [funnel, table(("rule", "count", "for example"), rows), by]


def _failed(data: ReportData) -> list[str]:
    blocks: list[str] = [_failures(data) if data.failures else el("p", words.no_failures(data))]
    if data.warnings:
        lines = (el("li", f"#{number}: {warning}") for number, warning in data.warnings)
        blocks += [el("h3", f"Warnings of {sources.noun(data)}s"), el("ul", *lines)]
    return blocks


def _failures(data: ReportData) -> Markup:
    rows = []
    for t in data.failures:
        details = ", ".join(f"{name}: {value}" for name, value in t.details)
        more = [el("br"), el("small", details, class_="soft")] if details else []
        why = el("td", t.message or "no message", *more, class_="wide")
        rows.append((str(t.number), t.role, t.ended, why, el("td", choices(t.choices), class_="wide")))
    return table(("#", "role", "status", "why", "configuration"), rows)


def _trend(data: ReportData) -> list[str]:
    if not data.trend.rows:
        return [el("p", sources.no_configuration(data))]
    blocks: list[str] = [el("p", notes.trend_intro(data), " ", _sources(data))]
    if data.trend.best:
        rows = [
            (check.name, str(check.grade), el("td", check.text, class_="wide")) for check in data.trend.best
        ]
        note = "note" if data.trend.best_problems else None
        blocks += [el("p", notes.trend_sentence(data), class_=note), table(notes.TREND_NAMES, rows)]
    blocks += [el("h3", sources.titles(data)["trend"]), *common(data)]
    blocks.append(table(notes.trend_names(data), notes.trend_rows(data)))
    found = [f"#{row.number}: {problem}" for row in data.trend.rows for problem in row.problems]
    return [*blocks, el("ul", *(el("li", line) for line in found))] if found else blocks


def _phases(data: ReportData) -> list[str]:
    return [
        el("p", f"Wall time of the {sources.noun(data)}s. ", source("measured")),
        table(notes.PHASE_NAMES, notes.phase_rows(data)),
    ]


def _method(data: ReportData) -> list[str]:
    blocks: list[str] = [facts(notes.method_rows(data))]
    if data.axes:
        rows = [(_axis_name(axis), el("td", ", ".join(axis.labels), class_="wide")) for axis in data.axes]
        blocks += [el("h3", "Axes that were searched"), table(("axis", "values"), rows)]
    return blocks


def _axis_name(axis: Axis) -> Markup:
    mark = [" ", el("span", "changes numerics", class_="tag changes")] if axis.changes_numerics else []
    return el("td", axis.name, *mark)
