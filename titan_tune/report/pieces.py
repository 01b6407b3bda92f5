"""Pieces of the HTML report that several sections use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from titan_tune.report import charts, words
from titan_tune.report.answer import Change, Choices
from titan_tune.report.data import ReportData
from titan_tune.report.markup import Markup, el, join

NUMBER_COLUMNS = frozenset(
    {"tokens/s", "duration", "first step", "last loss", "retries", "#", "count", "pairs", "change"}
)
"""Columns that are aligned to the right, by heading."""
NOTHING = "–"


def source(kind: str) -> Markup:
    """A tag that says where a number is from: measured, predicted or computed."""
    return el("span", kind, class_=f"tag {kind}")


def tile(what: str, kind: str, figure: str, more: str) -> Markup:
    """One large figure with its source and its bounds."""
    return el(
        "div",
        el("div", el("span", what), source(kind), class_="what"),
        el("div", figure, class_="figure"),
        el("div", more, class_="more"),
        class_="tile",
    )


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


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and values."""
    lines = [el("tr", el("th", name, scope="row"), el("td", text)) for name, text in rows]
    return el("table", el("tbody", *lines), class_="facts")


def changes(found: Sequence[Change]) -> Markup:
    """Keys as they were and as they are now."""
    rows = [(el("td", el("code", c.name)), c.before or "not known", c.after) for c in found]
    return table(("key", "as it was", "best"), rows)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table that scrolls sideways on its own; a cell that is markup is a whole ``td``."""
    head = el("tr", *(el("th", name, scope="col", class_=_align(name)) for name in names))
    lines = [el("tr", *(_cell(*pair) for pair in zip(names, row, strict=True))) for row in rows]
    return el("div", el("table", el("thead", head), el("tbody", *lines)), class_="scroll")


def maybe(value: float | None, show: Callable[[float], str]) -> str:
    """The value for people, or a dash where there is none."""
    return NOTHING if value is None else show(value)


def _cell(name: str, content: str) -> Markup:
    return content if isinstance(content, Markup) else el("td", content, class_=_align(name))


def _align(name: str) -> str | None:
    return "num" if name in NUMBER_COLUMNS else None
