"""One form for configurations that are the same run.

A search must not pay twice for one run, and a study must recognise a run it has already measured.
:func:`canonical` gives every key that has no effect in a configuration torchtitan's default, and every
key with several spellings one spelling; :func:`identity` is the text that equal runs share.

What is a no-op, and why, is in ``titan.noops``. The canonical form of a valid configuration is valid and
behaves the same; an invalid one stays invalid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from titan_tune.domain.candidate import Value, identity_of
from titan_tune.domain.model import ModelSpec
from titan_tune.domain.settings import Settings
from titan_tune.titan.keys import defaults, keys
from titan_tune.titan.noops import NORMALISERS, Normaliser

_BOOKKEEPING_SECTIONS = (
    "job.",
    "metrics.",
    "profiling.",
    "checkpoint.",
    "comm.",
    "validation.",
    "memory_estimation.",
    "experimental.",
)
_BOOKKEEPING_KEYS = frozenset(
    {
        # the flavor's name: the model's shape is part of the identity instead
        "model.flavor",
        "model.name",
        "model.hf_assets_path",
        "model.tokenizer_path",
        "model.print_after_conversion",
        # how long the run is; the schedule of the learning rate stays
        "training.steps",
        "training.gc_debug",
        "activation_checkpoint.visualize_memory_budget_pareto",
        # a probe sets its own
        "titan_tune.data",
    }
)


def is_bookkeeping(key: str) -> bool:
    """Whether a key says where a run is kept, logged or compared, not what it computes."""
    return key.startswith(_BOOKKEEPING_SECTIONS) or key in _BOOKKEEPING_KEYS


@cache
def identity_keys() -> tuple[str, ...]:
    """The keys that are part of a run's identity."""
    return tuple(key for key in keys() if not is_bookkeeping(key))


def canonical(values: Mapping[str, Value], settings: Settings) -> dict[str, Value]:
    """``values`` with no-ops at their defaults and one spelling for each meaning.

    ``values`` are all resolved keys, ``settings`` their typed view. Lists of the result must not be
    changed: they may be those of ``values``.
    """
    result = dict(values)
    for normalise in NORMALISERS:
        normalise(result, settings)
    return result


def identity(values: Mapping[str, Value], settings: Settings, model: ModelSpec) -> str:
    """The text that configurations share exactly when they are the same run.

    Canonical JSON of the canonical keys that differ from torchtitan's defaults, the model's shape and the
    number of ranks.
    """
    return identity_of_canonical(canonical(values, settings), model_shape(model), settings.cluster.world_size)


def identity_of_canonical(result: Mapping[str, Value], shape: str, world_size: int) -> str:
    """As :func:`identity`, from a canonical form and :func:`model_shape`."""
    return join_identity([_text(names, result) for names, _ in _tables().values()], shape, world_size)


def identity_tables() -> tuple[str, ...]:
    """Prefixes of the tables that have identity keys, in the order of :func:`join_identity`."""
    return tuple(_tables())


def table_identity(prefix: str, values: Mapping[str, Value], settings: Settings) -> str:
    """What the keys below ``prefix`` write into the identity, ``''`` where all have their defaults.

    It reads no more of ``values`` and ``settings`` than that needs.
    """
    names, normalisers = _tables()[prefix]
    form = _Form(values)
    for normalise in normalisers:
        normalise(form, settings)
    return _text(names, form)


def join_identity(texts: Iterable[str], shape: str, world_size: int) -> str:
    """The identity from the texts of all :func:`identity_tables`, the model's shape and the ranks."""
    parts = []
    for prefix, text in zip(_tables(), texts, strict=True):
        if prefix == "model.":
            parts.append(f'"model":"{shape}"')
        if text:
            parts.append(text)
    return f'{{{",".join(parts)},"world_size":{world_size}}}'


class _Form(dict[str, Value]):
    """What normalisers have written, over ``values``: nothing is copied that nobody reads."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        super().__init__()
        self._values = values

    def __missing__(self, key: str) -> Value:
        return self._values[key]


@cache
def _tables() -> Mapping[str, tuple[tuple[str, ...], tuple[Normaliser, ...]]]:
    """Prefix → its identity keys and the normalisers that write them. All sorted: the order of their JSON."""
    by_prefix: dict[str, list[str]] = {}
    for key in sorted(identity_keys()):
        by_prefix.setdefault(key[: key.index(".") + 1], []).append(key)
    return {
        prefix: (tuple(names), tuple(n for n, written in NORMALISERS.items() if prefix in written))
        for prefix, names in by_prefix.items()
    }


def _text(names: Sequence[str], form: Mapping[str, Value]) -> str:
    default = defaults()
    return ",".join(
        f'"{name}":{identity_of(value)}' for name in names if (value := form[name]) != default[name]
    )


def model_shape(model: ModelSpec) -> str:
    """A hash of the model's shape, without the flavor's name and how its shape was given.

    ``max_seq_len`` is left out: torchtitan overwrites it with the job's sequence length.
    """
    shape: dict[str, Any] = model.model_dump(
        exclude={"flavor", "max_seq_len", "model_args"}, exclude_none=True
    )
    # arguments that no field holds (rope_theta, norm_eps, …) still make another model
    rest = {name: value for name, value in model.model_args.items() if name not in _SHAPE_ARGS}
    text = json.dumps({**shape, "model_args": rest}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_SHAPE_ARGS = frozenset(
    {
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "vocab_size",
        "max_seq_len",
        "attn_type",
        "ffn_dim_multiplier",
        "multiple_of",
        "hidden_dim",
        "inter_dim",
        "qk_norm",
        "enable_weight_tying",
    }
)
"""Model arguments whose effect the fields of ModelSpec hold."""
