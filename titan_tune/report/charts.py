"""Charts as inline SVG. Widths are per cent and text is in pixels, so that a chart stays readable on a phone.

Shape tells what colour tells: ● finals, ○ exploring, a dashed ○ a dry run, ◆ the job as it was, × not measured, and a
ring around the best.
"""

from __future__ import annotations

from itertools import pairwise

from titan_tune.domain.probe import Origin
from titan_tune.report import words
from titan_tune.report.analysis import Comparison, Effect
from titan_tune.report.data import ReportData
from titan_tune.report.markup import Markup, el, join
from titan_tune.report.rows import Configuration, Step
from titan_tune.report.scale import PADDING, compact
from titan_tune.report.scale import Scale as Scale
from titan_tune.report.sources import interval_name, point_source
from titan_tune.report.words import percent, tokens, unit
from titan_tune.study.records import Role

LEFT, RIGHT = 11.0, 97.0
"""Horizontal plot area, per cent of the width: room for tick labels on the left."""
TOP = 10
HEIGHT = 250


def across(share: float, *, left: float = LEFT, right: float = RIGHT) -> str:
    """A share of the plot as an x coordinate."""
    return f"{left + share * (right - left):.2f}%"


def down(share: float, *, height: int = HEIGHT) -> str:
    """A share of the plot as a y coordinate; 0 is at the bottom."""
    return f"{TOP + (1.0 - share) * height:.1f}"


def glyph(kind: str, x: str, y: str, *children: str) -> Markup:
    """A marker centred on a point; ``kind`` is a space-separated list of: final, probe, dry, baseline, failed, best."""
    kinds = kind.split()
    shapes: list[str] = [el("circle", r=9, class_="ring")] if "best" in kinds else []
    if "baseline" in kinds:
        shapes.append(el("path", d="M0-6.5L6.5 0L0 6.5L-6.5 0Z", class_="mark baseline"))
    elif "failed" in kinds:
        shapes.append(el("path", d="M-4-4L4 4M-4 4L4-4", class_="mark failed"))
    else:
        kind = next((name for name in ("dry", "final") if name in kinds), "probe")
        shapes.append(el("circle", r=4.5, class_=f"mark {kind}"))
    return el("svg", *shapes, *children, x=x, y=y, overflow="visible", class_="glyph")


def legend_glyph(kind: str) -> Markup:
    """A marker for a legend."""
    return el("svg", glyph(kind, "11", "11"), width=22, height=22, aria_hidden="true", class_="key")


def kind_of(config: Configuration) -> str:
    """The marker of a configuration."""
    kind = mark_of(config.origin, is_baseline=config.is_baseline, final=config.final)
    return f"{kind} best" if config.is_best else kind


def mark_of(origin: Origin, *, is_baseline: bool, final: bool) -> str:
    """The marker of a throughput."""
    if is_baseline:
        return "baseline"
    return "dry" if origin is Origin.DRY_RUN else "final" if final else "probe"


def configuration_scale(configurations: tuple[Configuration, ...]) -> Scale:
    """The shared axis of the rows."""
    return Scale.around(*(bound for c in configurations for bound in c.interval))


def configuration_row(config: Configuration, scale: Scale, baseline: float | None) -> Markup:
    """Median and interval of one configuration, with a line where the job as it was lies."""
    low, high = (_inner(scale.share(bound)) for bound in config.interval)
    x = _inner(scale.share(config.tokens_per_second))
    parts: list[str] = [
        el("line", x1=_inner(scale.share(t)), x2=_inner(scale.share(t)), y1=0, y2="100%", class_="grid")
        for t in scale.ticks()
    ]
    if baseline is not None:
        at = _inner(scale.share(baseline))
        parts.append(el("line", x1=at, x2=at, y1=0, y2="100%", class_="reference"))
    parts.append(el("line", x1=low, x2=high, y1="50%", y2="50%", class_="interval"))
    cap = el("path", d="M0-4V4", class_="interval")
    parts += [el("svg", cap, x=bound, y="50%", overflow="visible") for bound in (low, high)]
    parts.append(glyph(kind_of(config), x, "50%"))
    bounds = f"{tokens(config.interval[0])} to {tokens(config.interval[1])}"
    label = f"{tokens(config.tokens_per_second)}, {interval_name(config.origin)} {bounds}"
    return el("svg", *parts, width="100%", height="100%", role="img", aria_label=label, class_="row")


def configuration_axis(scale: Scale) -> Markup:
    """Tick labels of the rows."""
    labels = [
        el("text", compact(t), x=_inner(scale.share(t)), y=12, text_anchor="middle") for t in scale.ticks()
    ]
    return el("svg", *labels, width="100%", height=16, aria_hidden="true")


def _inner(share: float) -> str:
    return across(share, left=3.0, right=97.0)


def progress(data: ReportData) -> Markup:
    """Every probe over the GPU-minutes spent, and the best so far as a stepped line."""
    measured = [s.tokens_per_second for s in data.steps if s.tokens_per_second is not None]
    y = Scale.around(*measured) if measured else Scale(0.0, 1.0)
    x = Scale(0.0, max((s.gpu_minutes for s in data.steps), default=1.0) * (1 + PADDING) or 1.0)
    parts: list[str] = [_frame(x, y if measured else None, words.minute_unit(data))]
    parts += _best_line(data.steps, x, y)
    for step in data.steps:
        parts.append(_step_mark(step, x, y, unit(data)))
    label = f"Throughput of {len(data.steps)} probes over {data.worker}-minutes"
    return _chart(parts, label)


def _best_line(steps: tuple[Step, ...], x: Scale, y: Scale) -> list[str]:
    lines: list[str] = []
    known = [(across(x.share(s.gpu_minutes)), s.best_so_far) for s in steps if s.best_so_far is not None]
    for (at, best), (until, after) in pairwise(known):
        level = down(y.share(best))
        lines.append(el("line", x1=at, x2=until, y1=level, y2=level, class_="best-line"))
        if after != best:
            lines.append(
                el("line", x1=until, x2=until, y1=level, y2=down(y.share(after)), class_="best-line")
            )
    return lines


def _step_mark(step: Step, x: Scale, y: Scale, per: str) -> Markup:
    at = across(x.share(step.gpu_minutes))
    if step.tokens_per_second is None:
        title = f"#{step.number} {step.status}: {step.label}"
        return glyph("failed", at, down(0.0), el("title", title))
    kind = mark_of(step.origin, is_baseline=step.is_baseline, final=step.role == Role.FINALIST)
    how = f" by {step.origin}" if step.origin is Origin.DRY_RUN else ""
    title = f"#{step.number} {step.role}{how}, {tokens(step.tokens_per_second)} {per}: {step.label}"
    return glyph(kind, at, down(y.share(step.tokens_per_second)), el("title", title))


def scatter(comparison: Comparison, *, label: str, is_memory: bool) -> Markup:
    """Predicted (across) against measured or dry run (up), with the line where both are equal."""
    values = [v for p in comparison.points for v in (p.predicted, p.measured)]
    scale = Scale.around(*values)
    parts: list[str] = [_frame(scale, scale, "predicted")]
    parts.append(el("line", x1=across(0), y1=down(0), x2=across(1), y2=down(1), class_="identity"))
    for point in comparison.points:
        found = point_source(point, memory=is_memory)
        title = f"predicted {point.predicted:,.1f}, {found} {point.measured:,.1f}: {point.label}"
        at = across(scale.share(point.predicted)), down(scale.share(point.measured))
        parts.append(glyph(mark_of(point.origin, is_baseline=False, final=False), *at, el("title", title)))
    return _chart(parts, label)


def effect_row(effect: Effect, scale: Scale) -> Markup:
    """Median ratio and the range over the pairs, around the line of no change."""
    zero = _inner(scale.share(1.0))
    low, high = _inner(scale.share(effect.lowest_ratio)), _inner(scale.share(effect.highest_ratio))
    parts = [
        el("line", x1=zero, x2=zero, y1=0, y2="100%", class_="reference"),
        el("line", x1=low, x2=high, y1="50%", y2="50%", class_="interval"),
        glyph("final", _inner(scale.share(effect.median_ratio)), "50%"),
    ]
    label = f"median {percent(effect.median_ratio - 1.0)}"
    return el("svg", *parts, width="100%", height="100%", role="img", aria_label=label, class_="row")


def effect_scale(effects: tuple[Effect, ...]) -> Scale:
    """The shared axis of the effects; it holds the line of no change."""
    bounds = [b for e in effects for b in (e.lowest_ratio, e.highest_ratio)]
    return Scale.around(1.0, *bounds)


def _frame(x: Scale, y: Scale | None, title: str) -> Markup:
    """Grid lines, tick labels and the title of the axis across; no labels upwards where nothing was measured."""
    parts: list[str] = []
    for tick in x.ticks():
        at = across(x.share(tick))
        parts.append(el("line", x1=at, x2=at, y1=down(1), y2=down(0), class_="grid"))
        parts.append(el("text", compact(tick), x=at, y=TOP + HEIGHT + 20, text_anchor="middle"))
    for tick in y.ticks() if y else ():
        level = float(down(y.share(tick))) if y else 0.0
        parts.append(el("line", x1=across(0), x2=across(1), y1=level, y2=level, class_="grid"))
        parts.append(el("text", compact(tick), x=f"{LEFT - 1}%", y=f"{level + 4:.1f}", text_anchor="end"))
    parts.append(el("line", x1=across(0), x2=across(1), y1=down(0), y2=down(0), class_="axis"))
    parts.append(el("text", title, x=f"{RIGHT}%", y=TOP + HEIGHT + 36, text_anchor="end"))
    return join(parts)


def _chart(parts: list[str], label: str) -> Markup:
    return el(
        "svg", *parts, width="100%", height=TOP + HEIGHT + 42, role="img", aria_label=label, class_="chart"
    )
