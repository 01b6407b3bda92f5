"""Models that torchtitan ships (``models.json``) and GPUs (``gpus.toml``), as domain types."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from titan_tune.catalog.shapes import spec_from_args
from titan_tune.catalog.typed import Key, check, key_from_entry, nearest, plain
from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import GpuSpec
from titan_tune.domain.model import ModelSpec
from titan_tune.errors import InputError


@cache
def _models() -> Mapping[str, Any]:
    text = files("titan_tune.catalog").joinpath("models.json").read_text(encoding="utf-8")
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def model_names() -> tuple[str, ...]:
    """torchtitan's ``model.name`` values that are known here."""
    return tuple(_models())


def flavors(name: str) -> tuple[str, ...]:
    """Flavors that torchtitan ships of a model.

    Raises:
        InputError: unknown model.
    """
    return tuple(_family(name)["flavors"])


def parameter_count(name: str, flavor: str) -> int:
    """Parameters of a shipped flavor, counted on torchtitan's own model (tied weights once)."""
    return int(_flavor(name, flavor)["measured"]["parameters"])


def _family(name: str, *, source: str = "") -> Mapping[str, Any]:
    if name not in _models():
        known = ", ".join(model_names())
        where = f"{source}: " if source else ""
        hint = nearest(name, model_names())
        raise InputError(f"{where}model.name: unknown model {name!r}{hint}; models: {known}")
    family: dict[str, Any] = _models()[name]
    return family


def _flavor(name: str, flavor: str) -> Mapping[str, Any]:
    known: dict[str, Any] = _family(name)["flavors"]
    if flavor not in known:
        raise InputError(
            f"model.flavor: {name} has no flavor {flavor!r}{nearest(flavor, known)}; "
            f"flavors: {', '.join(known)}; or define it in [titan_tune.model_args]"
        )
    entry: dict[str, Any] = known[flavor]
    return entry


@cache
def model_arg_keys(name: str) -> Mapping[str, Key]:
    """torchtitan's model-args fields of a model family, dotted (``moe_args.num_experts``) → key.

    Raises:
        InputError: unknown model.
    """
    fields = _family(name)["fields"]
    return MappingProxyType(
        {field: key_from_entry(f"titan_tune.model_args.{field}", entry) for field, entry in fields.items()}
    )


def any_model_arg(field: str, *, source: str) -> Key:
    """The field of whichever family has it, for checks made before the family is known.

    Raises:
        InputError: no family has such a field; names the nearest.
    """
    known: dict[str, Key] = {}
    for name in model_names():
        for other, key in model_arg_keys(name).items():
            known.setdefault(other, key)
    if field not in known:
        raise _unknown_field(field, known, "torchtitan's models", source)
    return known[field]


def _unknown_field(field: str, known: Mapping[str, Key], of: str, source: str) -> InputError:
    hint = nearest(field, known) or f"; fields: {', '.join(known)}"
    return InputError(f"{source}: titan_tune.model_args.{plain(field)} is no model argument of {of}{hint}")


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested tables as dotted keys; empty tables vanish."""
    flat: dict[str, Value] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(flat: Mapping[str, Value]) -> dict[str, Any]:
    """Dotted keys as nested tables; the inverse of :func:`flatten`."""
    table: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        level = table
        for parent in parents:
            level = level.setdefault(parent, {})
        level[leaf] = value
    return table


def check_model_args(name: str, model_args: Mapping[str, Any], *, source: str) -> dict[str, Value]:
    """Model arguments of one family, checked, as dotted keys (nested tables are accepted).

    Raises:
        InputError: a field that the family does not have, or a value that it does not take.
    """
    _family(name, source=source)
    known = model_arg_keys(name)
    checked = {}
    for field, value in flatten(model_args).items():
        if field not in known:
            raise _unknown_field(field, known, name, source)
        checked[field] = check(known[field], value, source=source)
    return checked


def model_spec(
    name: str,
    flavor: str,
    *,
    model_args: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
) -> ModelSpec:
    """The shape of a model.

    ``model_args`` (torchtitan's field names) define the flavor afresh: what they leave out has the
    default of torchtitan's model-args class, not the value of a shipped flavor of that name. With
    ``seq_len``, ``max_seq_len`` is what torchtitan makes of it in a job: the job's sequence length.

    Raises:
        InputError: unknown model or flavor, or arguments that torchtitan cannot build a model from.
    """
    spec = _custom_spec(name, flavor, model_args) if model_args else _shipped_spec(name, flavor)
    return spec.model_copy(update={"max_seq_len": seq_len}) if seq_len is not None else spec


@cache
def _shipped_spec(name: str, flavor: str) -> ModelSpec:
    given = flatten(_flavor(name, flavor)["model_args"])
    return spec_from_args(name, flavor, _defaults(name) | given)


def _custom_spec(name: str, flavor: str, model_args: Mapping[str, Any]) -> ModelSpec:
    given = check_model_args(name, model_args, source="model")
    spec = spec_from_args(name, flavor, _defaults(name) | given)
    return spec.model_copy(update={"model_args": nest(given)})


def _defaults(name: str) -> dict[str, Value]:
    return {field: key.default for field, key in model_arg_keys(name).items()}


@cache
def _gpus() -> Mapping[str, Any]:
    text = files("titan_tune.catalog").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs in the catalogue."""
    return tuple(_gpus())


@cache
def _gpu_aliases() -> Mapping[str, str]:
    aliases = {}
    for name, entry in _gpus().items():
        for alias in (name, *entry["aliases"]):
            aliases[_normalised(alias)] = name
    return aliases


def _normalised(name: str) -> str:
    """Lower case, without vendor words and punctuation: ``NVIDIA H100 80GB HBM3`` → ``h10080gbhbm3``."""
    words = re.sub(r"\b(nvidia|amd|instinct|geforce|tesla)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)


def gpu_spec(name: str) -> GpuSpec:
    """A GPU by catalogue name, common alias or driver name; case and punctuation do not matter.

    Raises:
        InputError: not in the catalogue; names the nearest ones.
    """
    known = _gpu_aliases().get(_normalised(name))
    if known is None:
        near = nearest(name.lower(), gpu_names())
        raise InputError(f"unknown GPU {name!r}{near}; GPUs: {', '.join(gpu_names())}")
    return _gpu_spec(known)


@cache
def _gpu_spec(name: str) -> GpuSpec:
    fields = {field: value for field, value in _gpus()[name].items() if field != "aliases"}
    return GpuSpec(name=name, **fields)
