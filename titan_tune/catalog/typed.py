"""Typed keys: what a dotted key may hold, and the check of a value against it.

Used for torchtitan's configuration keys and for its model arguments, which are recorded as data
files with one entry a key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_tune.domain.candidate import Value
from titan_tune.errors import InputError, did_you_mean

KeyType = Literal["bool", "int", "float", "str", "list"]

MAX_SHOWN = 80
"""Characters of a value that a message shows."""

_TYPE_TEXT: Mapping[str, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One dotted key: its type, default and the values it accepts."""

    name: str
    type: KeyType
    default: Value
    choices: tuple[str, ...] = ()
    """Of the value, or of each element of a list; empty where anything goes."""
    optional: bool = False
    """Whether ``None`` (unset) is a value."""
    element: str | None = None
    """Element type of a list: ``str`` or ``list[str]``."""
    minimum: float | None = None
    maximum: float | None = None
    also: tuple[int, ...] = ()
    """Values below ``minimum`` with a meaning of their own, e.g. -1 for "the ranks left over"."""
    pattern: str | None = None
    """Regular expression that a text must match in full."""
    pattern_text: str = ""
    """The pattern in words."""

    @property
    def expected(self) -> str:
        """What the key accepts, in words."""
        if self.type == "list":
            return self._expected_list()
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.pattern:
            return self.pattern_text
        text = _TYPE_TEXT[self.type]
        if self.minimum is not None and self.maximum is not None:
            text += f" from {self.minimum:g} to {self.maximum:,.10g}"
        elif self.minimum is not None:
            text += f" of at least {self.minimum:g}"
        return text + "".join(f" or {value}" for value in self.also)

    def _expected_list(self) -> str:
        elements = "lists of texts" if self.element == "list[str]" else "texts"
        return f"a list of {', '.join(self.choices)}" if self.choices else f"a list of {elements}"


def key_from_entry(name: str, entry: Mapping[str, Any]) -> Key:
    """A key from its entry in a data file."""
    fields = dict(entry)
    for field in ("choices", "also"):
        if field in fields:
            fields[field] = tuple(fields[field])
    return Key(name=name, **fields)


def nearest(word: str, choices: Iterable[str]) -> str:
    """``did_you_mean``, with a choice that differs only in case before all others."""
    names = list(choices)
    same = [name for name in names if name.casefold() == word.casefold()]
    return f" (did you mean {', '.join(same)}?)" if same else did_you_mean(word, names)


def plain(name: str) -> str:
    """A name for a one-line message: quoted where it holds line breaks or the like."""
    return name if name.isprintable() else json.dumps(name)


def printable(text: str) -> str:
    """The text with control characters as escapes: for comments of TOML and sbatch, and for terminals."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(value: Value) -> str:
    """A value on one line as a user would write it, shortened where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text = text if text.isprintable() else json.dumps(value)
    except TypeError:
        text = plain(str(value))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def check(key: Key, value: Value, *, source: str) -> Value:
    """The value as ``key`` holds it (an int for a float key becomes a float).

    Raises:
        InputError: wrong type, not among the choices or out of range; one line.
    """
    if value is None:
        if key.optional:
            return None
        raise _wrong(key, value, source)
    if key.type == "list":
        return _check_list(key, value, source)
    if key.type == "float" and type(value) is int:
        value = float(value)
    if type(value).__name__ != key.type:
        raise _wrong(key, value, source)
    if key.choices and value not in key.choices:
        raise _wrong(key, value, source, nearest(value, key.choices))
    if key.pattern and not re.fullmatch(key.pattern, value):
        raise _wrong(key, value, source)
    if key.type in ("int", "float") and not _in_range(key, value):
        raise _wrong(key, value, source)
    return value


def _check_list(key: Key, value: Value, source: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(key, value, source)
    for item in value:
        if key.element == "list[str]":
            fits = isinstance(item, list | tuple) and all(isinstance(part, str) for part in item)
        else:
            fits = isinstance(item, str)
        if not fits:
            raise _wrong(key, value, source)
        if key.choices and item not in key.choices:
            raise _wrong(key, value, source, nearest(item, key.choices))
    return [list(item) if isinstance(item, list | tuple) else item for item in value]


def _in_range(key: Key, value: float) -> bool:
    if math.isnan(value):
        return False
    if value in key.also:
        return True
    return (key.minimum is None or value >= key.minimum) and (key.maximum is None or value <= key.maximum)


def _wrong(key: Key, value: Value, source: str, hint: str = "") -> InputError:
    shown = "unset" if value is None else show(value)
    return InputError(f"{source}: {key.name} = {shown}: must be {key.expected}{hint}")
