"""A torchtitan job file (TOML): load it, override it, write it back as the user wrote it.

torchtitan 0.2.2 itself refuses unknown sections and keys (``ConfigManager._dict_to_dataclass`` raises
ValueError with the dataclass's name and all wrong names, as a traceback), but takes any value: a wrong
type or a misspelt choice only draws a tyro UserWarning and fails later, somewhere else, or not at all.
Names that it renamed (the converter ``float8``, ``model.tokenizer_path``) have no aliases. Here every key and value is
checked at load, with the nearest valid name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_tune.catalog.loader import check_model_args, flatten, model_spec, nest
from titan_tune.catalog.typed import MAX_SHOWN, plain, printable
from titan_tune.domain.candidate import Value
from titan_tune.domain.model import ModelSpec
from titan_tune.errors import InputError, TitanTuneError
from titan_tune.titan.keys import (
    MODEL_ARGS,
    check_value,
    defaults,
    find_key,
    is_section,
    keys,
    parse_assignment,
    unknown_key,
)

OWN_CONFIG_MODULE = "titan_tune.titan.plugin.config"
"""What ``job.custom_config_module`` names when titan-tune extends the job."""
MAX_DEPTH = 32
"""Levels of tables and lists that a file may have; torchtitan's keys need four."""


@dataclass(frozen=True)
class Job:
    """One job. ``values`` holds the explicit keys: those of ``text``, then overrides; dotted and checked.

    The members of ``[titan_tune.model_args]`` are among ``values`` under their dotted names and, as
    torchtitan nests them, in ``model_args``.
    """

    path: Path | None
    text: str
    values: Mapping[str, Value]
    model: ModelSpec
    model_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call the job: its file name."""
        return self.path.name if self.path is not None else "job"

    def get(self, key: str) -> Value:
        """The explicit value of a key, or torchtitan's default.

        Raises:
            InputError: no such key.
        """
        if key in self.values:
            return self.values[key]
        return find_key(key, source=self.name).default

    def resolved(self) -> dict[str, Value]:
        """Every key with its value; a fresh dict with fresh lists (model arguments are in ``model``)."""
        known = keys()
        explicit = {key: value for key, value in self.values.items() if key in known}
        full = {**defaults(), **explicit}
        return {key: list(value) if isinstance(value, list) else value for key, value in full.items()}

    def with_values(self, values: Mapping[str, Value]) -> Job:
        """The job with further overrides; ``None`` takes a key back to torchtitan's default.

        Raises:
            InputError: unknown key, wrong value, or a model that does not exist.
        """
        return _job(_merged(self, values), path=self.path, text=self.text, source=self.name)


def load_job(path: Path | str, *, sets: Sequence[str] = (), hf_config: Path | None = None) -> Job:
    """Read a job file and apply ``--set KEY=VALUE`` overrides.

    ``hf_config`` (a Hugging Face ``config.json``) replaces ``model.name`` and the model arguments of the
    file; ``sets`` come last.

    Raises:
        InputError: one line for a missing or unreadable file, broken TOML, unknown keys, wrong values, or
            an unknown model or flavor.
    """
    path = Path(path)
    text, source = read_text(path), str(path)
    values = _parse(text, source=source)
    if hf_config is not None:
        from titan_tune.titan.hf_config import model_args_from_hf

        name, model_args = model_args_from_hf(hf_config)
        values = {key: value for key, value in values.items() if not key.startswith(f"{MODEL_ARGS}.")}
        values["model.name"] = name
        values |= flatten(model_args, f"{MODEL_ARGS}.")
        source = f"{path} with {hf_config}"
    values |= dict(parse_assignment(assignment, source="--set") for assignment in sets)
    of_the_model = [
        f"--set {text}" for text in sets if text.lstrip().startswith(("model.", f"{MODEL_ARGS}."))
    ]
    source = " with ".join([source, " ".join(of_the_model)]) if of_the_model else source
    return _job(values, path=path, text=text, source=source)


def job_from_text(text: str, *, name: str) -> Job:
    """A job from TOML text; ``name`` stands for the file in messages.

    Raises:
        InputError: as :func:`load_job`.
    """
    return _job(_parse(text, source=name), path=None, text=text, source=name)


def read_text(path: Path) -> str:
    """A UTF-8 text file, line ends as they are.

    Raises:
        InputError: missing, a directory, unreadable or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, not a file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{path}: cannot be read ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """TOML text as nested tables.

    Raises:
        InputError: broken TOML (says line and column), tables nested without end, an integer beyond TOML's 64 bits.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError itself: an integer of more than 4300 digits
        raise InputError(f"{source}: is not valid TOML: {' '.join(str(error).split())}") from None
    _check_bounds(tables, source)
    return tables


def _check_bounds(tables: Mapping[str, Any], source: str) -> None:
    """That nothing is deeper than ``MAX_DEPTH`` and no integer longer than TOML allows."""
    left: list[tuple[str, int, Any]] = [(plain(name), 1, value) for name, value in tables.items()]
    while left:
        key, depth, value = left.pop()
        if depth > MAX_DEPTH:
            raise InputError(f"{source}: {key[:MAX_SHOWN]}… is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            left += [(f"{key}.{plain(name)}", depth + 1, inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(key, depth + 1, inner) for inner in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise InputError(f"{source}: {key} has {value.bit_length()} bits; integers in TOML have 64")


def _parse(text: str, *, source: str) -> dict[str, Value]:
    return values_from_tables(parse_toml(text, source=source), source=source)


def values_from_tables(tables: Mapping[str, Any], *, source: str) -> dict[str, Value]:
    """Nested tables of a job as checked, dotted keys.

    Raises:
        InputError: unknown section or key, a value where a section belongs, or a wrong value.
    """
    job = tables.get("job")
    module = job.get("custom_config_module") if isinstance(job, Mapping) else None
    note = ""
    if module and module != OWN_CONFIG_MODULE:
        note = "; sections that job.custom_config_module adds are not supported"
    values: dict[str, Value] = {}
    _walk(tables, "", values, source=source, note=note)
    return values


def _walk(
    tables: Mapping[str, Any], prefix: str, values: dict[str, Value], *, source: str, note: str
) -> None:
    in_model_args = prefix.startswith(f"{MODEL_ARGS}.")
    for member, value in tables.items():
        key = f"{prefix}{member}"
        section = is_section(key) or (in_model_args and isinstance(value, Mapping))
        if "." in member:
            # a quoted key; torchtitan would look for a field with a dot in its name
            raise InputError(
                f"{source}: {prefix}{json.dumps(member)} is no key; write dotted keys without quotes"
            )
        if section and isinstance(value, Mapping):
            _walk(value, f"{key}.", values, source=source, note=note)
        elif section:
            raise InputError(f"{source}: {key} is a section, not a key; write it as [{key}]")
        elif key not in keys() and not in_model_args:
            if isinstance(value, Mapping) and not prefix:
                key = f"{key}."
            raise unknown_key(key, source=source, note=note)
        else:
            values[key] = check_value(key, value, source=source)


def _job(values: Mapping[str, Value], *, path: Path | None, text: str, source: str) -> Job:
    prefix = f"{MODEL_ARGS}."
    given = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    name = values.get("model.name", defaults()["model.name"])
    flavor = values.get("model.flavor", defaults()["model.flavor"])
    model_args = nest(check_model_args(name, given, source=source)) if given else {}
    try:
        model = model_spec(name, flavor, model_args=model_args)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return Job(path=path, text=text, values=values, model=model, model_args=model_args)


def render(job: Job, values: Mapping[str, Value], *, comments: Sequence[str] = ()) -> str:
    """The job's TOML with ``values`` set; comments, order and untouched lines stay as they are.

    Keys that exist are edited in place, others are added to their table; ``None`` removes a key.
    Overrides that ``job`` carries (``--set``, ``--hf-config``, ``with_values``) are written too.
    ``comments`` become comment lines at the top.

    Raises:
        InputError: unknown key or wrong value.
    """
    written = _parse(job.text, source=job.name)
    wanted = _merged(job, values)
    text = job.text
    if written != wanted:
        from titan_tune.titan.edit import edit_toml

        changed = {key: value for key, value in wanted.items() if written.get(key) != value}
        text = edit_toml(
            text,
            replaced={key: value for key, value in changed.items() if key in written},
            added={key: value for key, value in changed.items() if key not in written},
            removed=[key for key in written if key not in wanted],
        )
        if _parse(text, source=job.name) != wanted:
            raise TitanTuneError(f"{job.name}: the file could not be rewritten; write its tables out in full")
    lines = [printable(line) for comment in comments for line in comment.splitlines() or [""]]
    block = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return f"{block}\n{text}" if block else text


def _merged(job: Job, values: Mapping[str, Value]) -> dict[str, Value]:
    """The job's explicit values with ``values`` over them, checked."""
    merged = dict(job.values)
    for key, value in values.items():
        if value is None:
            find_key(key, source=job.name)
            merged.pop(key, None)
        else:
            merged[key] = check_value(key, value, source=job.name)
    return merged
