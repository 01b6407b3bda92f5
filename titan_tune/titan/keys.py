"""The configuration keys of torchtitan 0.2.2, and titan-tune's own ``[titan_tune]`` keys.

``keys.json`` is generated from torchtitan's ``JobConfig``, so that nothing here imports it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from titan_tune.catalog.loader import any_model_arg
from titan_tune.catalog.typed import Key, check, key_from_entry, nearest, plain
from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import CompileMode
from titan_tune.errors import InputError

__all__ = [
    "MODEL_ARGS",
    "Key",
    "check_value",
    "defaults",
    "find_key",
    "is_section",
    "keys",
    "members",
    "parse_assignment",
    "unknown_key",
]

MODEL_ARGS = "titan_tune.model_args"
"""The table that defines the model flavor; its members are torchtitan's model-args fields."""

_OWN_KEYS = (
    Key("titan_tune.compile_mode", "str", "default", choices=tuple(mode.value for mode in CompileMode)),
    Key("titan_tune.data", "str", "job", choices=("synthetic", "job")),
    Key("titan_tune.custom_import", "str", ""),
)


@cache
def keys() -> Mapping[str, Key]:
    """Every dotted key with its type: torchtitan's, then ``titan_tune.*`` (without the model arguments)."""
    text = files("titan_tune.titan").joinpath("keys.json").read_text(encoding="utf-8")
    recorded = {name: key_from_entry(name, entry) for name, entry in json.loads(text)["keys"].items()}
    return MappingProxyType(recorded | {key.name: key for key in _OWN_KEYS})


@cache
def defaults() -> Mapping[str, Value]:
    """Default of every key. Lists are shared: copy before changing one."""
    return MappingProxyType({name: key.default for name, key in keys().items()})


@cache
def _sections() -> frozenset[str]:
    parents = {MODEL_ARGS}
    for name in keys():
        parts = name.split(".")
        parents.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    return frozenset(parents)


def is_section(name: str) -> bool:
    """Whether the dotted name is a table, e.g. ``training.dataloader``."""
    return name in _sections()


def members(section: str) -> list[str]:
    """Keys and tables directly below a section; the top-level sections for ``''``."""
    prefix = f"{section}." if section else ""
    names = [*keys(), MODEL_ARGS]
    below = (name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix))
    return list(dict.fromkeys(below))


def find_key(name: str, *, source: str) -> Key:
    """The key of a dotted name, ``titan_tune.model_args.*`` included (of any model family).

    Raises:
        InputError: no such key; names the nearest ones.
    """
    key = keys().get(name)
    if key is None and name.startswith(f"{MODEL_ARGS}."):
        key = any_model_arg(name.removeprefix(f"{MODEL_ARGS}."), source=source)
    if key is None:
        raise unknown_key(name, source=source)
    return key


def check_value(key: str, value: Value, *, source: str) -> Value:
    """``value`` as the key holds it (ints become floats where the key is a float).

    Raises:
        InputError: unknown key, wrong type or not among the choices; one line.
    """
    return check(find_key(key, source=source), value, source=source)


def unknown_key(name: str, *, source: str, note: str = "") -> InputError:
    """The error for a name that is no key: what is near, or what its section holds."""
    if is_section(name):
        return InputError(f"{source}: {name} is a section with {', '.join(members(name))}")
    section, _, member = name.rpartition(".")
    while section and not is_section(section):
        if section in keys():
            return InputError(f"{source}: {section} is a key, not a section; unknown key {plain(name)}")
        section, _, member = section.rpartition(".")
    siblings = members(section)
    hint = _dotted_hint(member, section) or _elsewhere(member)
    where = f"keys of [{section}]" if section else "sections"
    hint = hint or f"; {where}: {', '.join(siblings)}"
    what = f"section [{plain(member)}]" if not section and "." in name else f"key {plain(name)}"
    return InputError(f"{source}: unknown {what}{hint}{note}")


def _dotted_hint(member: str, section: str) -> str:
    """Nearest members of a section, under their full names."""
    names = {name: f"{section}.{name}" if section else name for name in members(section)}
    hint = nearest(member, names)
    for name, full in names.items():
        hint = re.sub(rf"(?<=[ ]){re.escape(name)}(?=[,?])", full, hint)
    return hint


def _elsewhere(member: str) -> str:
    """Keys and sections whose last part is ``member``, or a full name like it."""
    names = [*keys(), *sorted(_sections())]
    same = [name for name in names if name.rpartition(".")[2] == member]
    return f" (did you mean {', '.join(same[:3])}?)" if same else nearest(member, names)


def parse_assignment(text: str, *, source: str) -> tuple[str, Value]:
    """``KEY=VALUE`` as (key, checked value). The value is TOML; text keys also take a bare word, and
    lists of texts take ``a,b``.

    Raises:
        InputError: no ``=``, unknown key, or a value that the key does not accept.
    """
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise InputError(f"{source} {plain(text)}: must be KEY=VALUE, e.g. training.seq_len=4096")
    key = find_key(name, source=source)
    if not raw:
        raise InputError(f"{source} {plain(text)}: {name} has no value; it must be {key.expected}")
    return name, check(key, _parse_raw(key, raw, source=source), source=source)


def _parse_raw(key: Key, raw: str, *, source: str) -> Value:
    quoted = raw[0] in "\"'"
    if key.type == "str" and not quoted:
        return raw
    if key.type == "list" and not quoted and not raw.startswith("["):
        return [part.strip() for part in raw.split(",") if part.strip()]
    try:
        document = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        raise InputError(f"{source}: {key.name} = {plain(raw)}: must be {key.expected}") from None
    if len(document) != 1:
        raise InputError(f"{source}: {key.name} = {plain(raw)}: must be {key.expected}")
    return document["value"]
