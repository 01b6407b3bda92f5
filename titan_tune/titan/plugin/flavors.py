"""A flavor that torchtitan does not ship, from ``[titan_tune.model_args]``."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any


def with_flavor(train_spec: Any, flavor: str, model_args: Mapping[str, Any]) -> Any:
    """``train_spec`` that also knows ``flavor``, built from the model-args class of its own family.

    Keys that are not given have the class's defaults, as in torchtitan's own flavor tables.
    Raises ValueError for a key that the class does not have.
    """
    args_class = type(next(iter(train_spec.model_args.values())))
    args = build_dataclass(args_class, model_args, "titan_tune.model_args")
    return dataclasses.replace(train_spec, model_args={**train_spec.model_args, flavor: args})


def build_dataclass(cls: Any, values: Mapping[str, Any], where: str) -> Any:
    """An instance of ``cls`` from a TOML table; tables inside become the dataclasses their fields name."""
    fields = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - fields):
        raise ValueError(
            f"{where}.{unknown[0]} is not a field of {cls.__name__}; its fields: {', '.join(sorted(fields))}"
        )
    hints = typing.get_type_hints(cls)
    return cls(**{key: _build(hints[key], value, f"{where}.{key}") for key, value in values.items()})


def _build(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    nested = [option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)]
    if not nested:
        raise ValueError(f"{where} must not be a table")
    return build_dataclass(nested[0], value, where)
