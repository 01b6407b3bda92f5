"""Resolved dotted keys → torchtitan's ``JobConfig``, train spec and model arguments. Child process only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from titan_tune.domain.candidate import Value
from titan_tune.titan.plugin.flavors import with_flavor

OWN_SECTION = "titan_tune."
COMPILE_BACKEND = "titan_tune_trace"


def job_config(values: Mapping[str, Value]) -> Any:
    """torchtitan's ``JobConfig`` with ``values``; compilation goes to the trace's own backend."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    for key, value in values.items():
        if not key.startswith(OWN_SECTION):
            _set(config, key.split("."), value)
    config.compile.backend = COMPILE_BACKEND
    return config


def _set(config: Any, path: list[str], value: Value) -> None:
    *parents, leaf = path
    for name in parents:
        config = getattr(config, name)
    if not any(field.name == leaf for field in dataclasses.fields(config)):
        raise ValueError(f"{'.'.join(path)} is not a key of torchtitan's {type(config).__name__}")
    setattr(config, leaf, value)


def train_spec(config: Any, model_args: Mapping[str, Any], layers: int | None) -> tuple[Any, Any]:
    """torchtitan's train spec and the arguments of the job's flavor, ``layers`` deep if given."""
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(config.model.name)
    if model_args:
        spec = with_flavor(spec, config.model.flavor, model_args)
    if config.model.flavor not in spec.model_args:
        raise ValueError(
            f"model.flavor: {config.model.name} has no flavor {config.model.flavor!r}; "
            f"flavors: {', '.join(spec.model_args)}"
        )
    args = spec.model_args[config.model.flavor]
    if layers is not None:
        args = dataclasses.replace(args, n_layers=layers)
    args.update_from_config(config)
    return spec, args
