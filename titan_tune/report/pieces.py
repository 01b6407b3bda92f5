"""Pieces of the HTML report that several sections use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from titan_tune.report import charts, words
from titan_tune.report.answer import Change, Choices
from titan_tune.report.blocks import table
from titan_tune.report.data import ReportData
from titan_tune.report.markup import Markup, el, join

NOTHING = "–"


def choices(pairs: Choices) -> Markup:
    """Axis and label pairs that break only between pairs."""
    last = len(pairs) - 1
    shown = [
        el("span", el("span", f"{axis} ", class_="soft"), label, "," if place < last else "", class_="choice")
        for place, (axis, label) in enumerate(pairs)
    ]
    return join(shown, " ") if shown else el("span", "the job as it is")


def common(data: ReportData) -> list[str]:
    """What labels leave out, if anything."""
    same = words.common_sentence(data)
    return [el("p", same, class_="soft")] if same else []


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Markers and what they mean."""
    keys = (el("span", charts.legend_glyph(kind), text) for kind, text in entries)
    return el("div", *keys, class_="legend")


def changes(found: Sequence[Change]) -> Markup:
    """Keys as they were and as they are now."""
    rows = [(el("td", el("code", c.name)), c.before or "not known", c.after) for c in found]
    return table(("key", "as it was", "best"), rows)


def maybe(value: float | None, show: Callable[[float], str]) -> str:
    """The value for people, or a dash where there is none."""
    return NOTHING if value is None else show(value)
