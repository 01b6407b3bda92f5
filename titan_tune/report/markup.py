"""HTML and SVG elements that escape by construction: only :class:`Markup` goes in as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "br", "hr"})

# Control characters and lone surrogates have no place in a UTF-8 page; bidirectional overrides would let a
# string from a study show something else than it says.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def clean(text: str) -> str:
    """The text with a replacement character for what cannot or should not be shown."""
    return _UNPRINTABLE.sub("�", text)


def el(tag: str, *children: str, **attributes: object) -> Markup:
    """One element. Children that are not :class:`Markup` are escaped, and so is every attribute value.

    ``class_`` is ``class``, other underscores are dashes; an attribute that is ``None`` is left out.
    """
    rendered = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(clean(str(value)))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Markup(f"<{tag}{rendered}>")
    return Markup(f"<{tag}{rendered}>{join(children)}</{tag}>")


def join(children: Iterable[str], separator: str = "") -> Markup:
    """Children one after another, escaped where they are not markup."""
    return Markup(separator.join(c if isinstance(c, Markup) else escape(clean(c)) for c in children))
