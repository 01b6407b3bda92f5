"""Blocks that every HTML page is made of; nothing here knows a study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import titan_tune
from titan_tune.report.markup import Markup, el
from titan_tune.report.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: a page may load nothing, whatever its data holds."""
NUMBER_COLUMNS = frozenset(
    {"tokens/s", "duration", "first step", "last loss", "retries", "#", "count", "pairs", "change"}
    | {"GiB", "bytes", "share", "active", "device", "tokens/s/GPU", "GPUs", "bytes/parameter", "GB in all"}
    | {"GB a GPU"}
)
"""Columns that are aligned to the right, by heading."""


def head(title: str, *, generator: str, css: str = "") -> Markup:
    """Everything before the body; ``css`` comes after the common style sheet."""
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="generator", content=f"{generator} {titan_tune.__version__}"),
        el("title", title),
        el("style", Markup(CSS + css)),
    )


def source(kind: str) -> Markup:
    """A tag that says where a number is from: measured, dry run, predicted or computed."""
    return el("span", kind, class_=f"tag {kind.split()[0]}")


def tile(what: str, kind: str, figure: str, more: str) -> Markup:
    """One large figure with its source and its bounds."""
    return el(
        "div",
        el("div", el("span", what), source(kind), class_="what"),
        el("div", figure, class_="figure"),
        el("div", more, class_="more"),
        class_="tile",
    )


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and values."""
    lines = [el("tr", el("th", name, scope="row"), el("td", text)) for name, text in rows]
    return el("table", el("tbody", *lines), class_="facts")


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table that scrolls sideways on its own; a cell that is markup is a whole ``td``."""
    head = el("tr", *(el("th", name, scope="col", class_=_align(name)) for name in names))
    lines = [el("tr", *(_cell(*pair) for pair in zip(names, row, strict=True))) for row in rows]
    return el("div", el("table", el("thead", head), el("tbody", *lines)), class_="scroll")


def _cell(name: str, content: str) -> Markup:
    return content if isinstance(content, Markup) else el("td", content, class_=_align(name))


def _align(name: str) -> str | None:
    return "num" if name in NUMBER_COLUMNS else None
