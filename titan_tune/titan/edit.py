"""Edit a TOML document in place: comments, order and untouched lines stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
from tomlkit.items import InlineTable

from titan_tune.domain.candidate import Value


def edit_toml(
    text: str, *, replaced: Mapping[str, Value], added: Mapping[str, Value], removed: Sequence[str]
) -> str:
    """The document with dotted keys replaced where they stand, added to their tables, or removed.

    Tables that are missing follow at the end. ``replaced`` and ``removed`` keys must exist. Removing the
    only key of a table that is written in several places takes the comments of that place along.
    """
    # tomlkit joins an added key to a last line without an end
    document = tomlkit.parse(text if not text or text.endswith("\n") else f"{text}\n")
    for key in removed:
        table, leaf = _table_of(document, key)
        del table[leaf]
    for key, value in replaced.items():
        table, leaf = _table_of(document, key)
        table[leaf] = _item(value, table[leaf])
    missing: dict[str, list[str]] = {}
    for key, value in added.items():
        if not _add(document, key.split("."), value):
            parent, _, leaf = key.rpartition(".")
            missing.setdefault(parent, []).append(f"{leaf} = {_item(value).as_string()}")
    blocks = [tomlkit.dumps(document).rstrip("\n")] if document.body else []
    blocks += ["\n".join([f"[{table}]", *lines]) for table, lines in missing.items()]
    return "\n\n".join(blocks) + "\n" if missing else tomlkit.dumps(document)


def _table_of(document: tomlkit.TOMLDocument, key: str) -> tuple[Any, str]:
    *parents, leaf = key.split(".")
    table: Any = document
    for parent in parents:
        table = table[parent]
    return table, leaf


def _item(value: Value, old: Any = None) -> Any:
    """A tomlkit item with the old one's trailing comment and spacing."""
    item = tomlkit.item(value)
    if old is not None and hasattr(old, "trivia"):
        item.trivia.comment_ws = old.trivia.comment_ws
        item.trivia.comment = old.trivia.comment
        item.trivia.trail = old.trivia.trail
    return item


def _add(document: tomlkit.TOMLDocument, parts: Sequence[str], value: Value) -> bool:
    """Add the key to its table, or to the inline table around it; ``False`` where there is neither.

    A missing table is never added through tomlkit: beside dotted keys it would take over the lines that
    follow.
    """
    table: Any = document
    *parents, leaf = parts
    for depth, parent in enumerate(parents):
        if parent not in table:
            if not isinstance(table, InlineTable):
                return False
            table[parent] = _inline([*parents[depth + 1 :], leaf], value)
            return True
        table = table[parent]
    table[leaf] = _item(value)
    return True


def _inline(parts: Sequence[str], value: Value) -> InlineTable:
    table = tomlkit.inline_table()
    table[parts[0]] = _item(value) if len(parts) == 1 else _inline(parts[1:], value)
    return table
