"""Charts of the memory page as inline SVG: stacked bars and the step's timeline. Widths are per cent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from titan_tune.report.markup import Markup, el
from titan_tune.report.memory_bars import size, words
from titan_tune.report.scale import Scale, compact
from titan_tune.trace.events import STEP_PHASE, Point
from titan_tune.units import GIB, gib

LEFT, RIGHT = 7.0, 98.0
"""Plot area of the timeline, per cent of the width."""
TOP, HEIGHT = 26, 250
VIEW_WIDTH = 1000
LABEL_SHARE = 0.06
"""A segment of a bar this wide carries its figure; a phase this wide its name."""
FAR_ABOVE = 1.5
"""A card larger than the peak by more than this would flatten the curve: its line is left out."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: bytes by component. ``note`` stands at its right."""

    name: str
    parts: Mapping[str, float]
    note: str
    is_worst: bool = False


def bars(rows: Sequence[Bar], *, limit_bytes: float) -> Markup:
    """Stacked bars on one axis, with a line where the allocator's room on the card ends."""
    longest = max(sum(row.parts.values()) for row in rows)
    scale = Scale(0.0, 1.04 * max(longest, limit_bytes))
    lines = [
        el(
            "li",
            el("span", row.name, class_="name"),
            el("span", _bar(row, scale, limit_bytes), class_="plot across"),
            el("span", size(sum(row.parts.values())), el("small", row.note), class_="value"),
            class_="best" if row.is_worst else None,
        )
        for row in rows
    ]
    ticks = Scale(0.0, scale.high / GIB).ticks()
    labels = [
        el("text", compact(t), x=_percent(scale.share(t * GIB)), y=12, text_anchor="middle" if t else "start")
        for t in ticks
    ]
    axis = el("svg", *labels, width="100%", height=16, aria_hidden="true")
    unit = el("li", el("span", "GiB", class_="name soft"), el("span", axis, class_="across"), el("span"))
    return el("ul", unit, *lines, class_="rows")


def _bar(row: Bar, scale: Scale, limit_bytes: float) -> Markup:
    parts: list[str] = []
    start = 0.0
    for component, held in row.parts.items():
        if held <= 0:
            continue
        share = scale.share(held)
        title = el("title", f"{words(component)}: {size(held)}")
        place = {"x": _percent(scale.share(start)), "width": _percent(share)}
        parts.append(el("rect", title, **place, y="15%", height="70%", class_=f"part {component}"))
        if share >= LABEL_SHARE:
            middle = _percent(scale.share(start) + share / 2)
            label = f"{held / GIB:.1f}"
            parts.append(
                el("text", label, x=middle, y="50%", dy=4, text_anchor="middle", class_=f"on {component}")
            )
        start += held
    at = _percent(scale.share(limit_bytes))
    parts.append(el("line", x1=at, x2=at, y1=0, y2="100%", class_="reference"))
    label = ", ".join(f"{words(name)} {size(held)}" for name, held in row.parts.items() if held > 0)
    return el("svg", *parts, width="100%", height="100%", role="img", aria_label=label, class_="row")


def legend(components: Iterable[str]) -> Markup:
    """Colours and what they mean, in the order of the bars."""
    keys = []
    for name in components:
        square = el("rect", x=3, y=5, width=13, height=13, class_=f"part {name}")
        keys.append(el("span", el("svg", square, width=20, height=22, aria_hidden="true"), words(name)))
    line = el("line", x1=9, x2=9, y1=2, y2=20, class_="reference")
    keys.append(el("span", el("svg", line, width=18, height=22, aria_hidden="true"), "the room on the card"))
    return el("div", *keys, class_="legend")


def last_step(timeline: Sequence[Point]) -> list[Point]:
    """The points of the last training step."""
    starts = [
        place
        for place, (before, after) in enumerate(pairwise(timeline), start=1)
        if after.phase == STEP_PHASE != before.phase
    ]
    return list(timeline[starts[-1] if starts else 0 :])


def timeline(points: Sequence[Point], *, limit_bytes: float, label: str) -> Markup:
    """Active memory over one step; across, what the step allocates and frees, in order."""
    top = max(point.active_bytes for point in points)
    shows_limit = limit_bytes <= FAR_ABOVE * top
    y = Scale(0.0, 1.08 * gib(max(top, limit_bytes) if shows_limit else top))
    x = Scale(points[0].event, max(points[-1].event, points[0].event + 1))
    parts: list[str] = [*_bands(points, x), *_grid(y), _curve(points, x, y), *_peak(points, x, y)]
    if shows_limit:
        level = _y(y.share(gib(limit_bytes)))
        parts.append(el("line", x1=f"{LEFT}%", x2=f"{RIGHT}%", y1=level, y2=level, class_="reference"))
    bottom = TOP + HEIGHT
    parts.append(el("line", x1=f"{LEFT}%", x2=f"{RIGHT}%", y1=bottom, y2=bottom, class_="axis"))
    return el("svg", *parts, width="100%", height=bottom + 8, role="img", aria_label=label, class_="chart")


def _bands(points: Sequence[Point], x: Scale) -> list[str]:
    """Alternating backgrounds of the phases, named where there is room."""
    parts: list[str] = []
    groups = [list(group) for _, group in groupby(points, key=_phase)]
    for place, group in enumerate(groups):
        begin = x.share(group[0].event)
        end = x.share(groups[place + 1][0].event) if place + 1 < len(groups) else 1.0
        name = words(_phase(group[0]))
        title = el("title", name)
        at, wide = _x(begin), f"{(end - begin) * (RIGHT - LEFT):.2f}%"
        if place % 2:
            parts.append(el("rect", title, x=at, width=wide, y=TOP, height=HEIGHT, class_="band"))
        if end - begin >= LABEL_SHARE:
            parts.append(el("text", name, x=_x((begin + end) / 2), y=TOP - 8, text_anchor="middle"))
    return parts


def _grid(y: Scale) -> list[str]:
    parts: list[str] = []
    for tick in y.ticks():
        level = _y(y.share(tick))
        parts.append(el("line", x1=f"{LEFT}%", x2=f"{RIGHT}%", y1=level, y2=level, class_="grid"))
        parts.append(
            el("text", compact(tick), x=f"{LEFT - 1}%", y=f"{float(level) + 4:.1f}", text_anchor="end")
        )
    return [*parts, el("text", "GiB", x=f"{LEFT - 1}%", y=TOP - 8, text_anchor="end")]


def _curve(points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    path = [f"M0 {HEIGHT}"]
    for point in points:
        across = VIEW_WIDTH * x.share(point.event)
        path.append(f"L{across:.1f} {HEIGHT * (1 - y.share(gib(point.active_bytes))):.1f}")
    path.append(f"L{VIEW_WIDTH} {HEIGHT}Z")
    shape = el("path", d="".join(path), class_="area", vector_effect="non-scaling-stroke")
    return el(
        "svg", shape, x=f"{LEFT}%", y=TOP, width=f"{RIGHT - LEFT}%", height=HEIGHT,
        viewBox=f"0 0 {VIEW_WIDTH} {HEIGHT}", preserveAspectRatio="none",
    )  # fmt: skip


def _peak(points: Sequence[Point], x: Scale, y: Scale) -> list[str]:
    peak = max(points, key=lambda point: point.active_bytes)
    share = x.share(peak.event)
    at, level = _x(share), _y(y.share(gib(peak.active_bytes)))
    beyond_middle = share > 0.5
    text = f"{size(peak.active_bytes)} in {words(_phase(peak))}"
    return [
        el("circle", cx=at, cy=level, r=4.5, class_="mark final"),
        el("text", text, x=at, y=level, dx=-9 if beyond_middle else 9, dy=-6,
           text_anchor="end" if beyond_middle else "start", class_="strong"),
    ]  # fmt: skip


def _phase(point: Point) -> str:
    return point.phase.partition(".")[0]


def _x(share: float) -> str:
    return f"{LEFT + share * (RIGHT - LEFT):.2f}%"


def _y(share: float) -> str:
    return f"{TOP + (1 - share) * HEIGHT:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
