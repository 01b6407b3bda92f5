"""Axes by name, and axes of a dotted torchtitan key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.model import ModelSpec
from titan_tune.domain.settings import AcMode, CompileMode
from titan_tune.errors import InputError, did_you_mean
from titan_tune.space.axes import Axis, AxisValue
from titan_tune.titan.canonical import is_bookkeeping
from titan_tune.titan.job import Job
from titan_tune.titan.keys import MODEL_ARGS, check_value, find_key
from titan_tune.titan.rules.facts import FAMILIES_WITHOUT_PIPELINE

AUTO = "auto"


@dataclass(frozen=True)
class AxisContext:
    """What an axis is built from. ``source`` names the file in messages."""

    base: Job
    cluster: ClusterSpec
    global_batch_size: int
    source: str


def build_axis(name: str, raw: Any, context: AxisContext) -> Axis:
    """The axis ``name`` from what the space file says of it: a list, or ``"auto"``.

    Raises:
        InputError: unknown axis, unknown value, an empty list, or a value given twice.
    """
    where = f"{context.source}: axes.{name}"
    if name not in NAMED_AXES:
        return _key_axis(name, raw, context, where)
    if raw == AUTO and name in _AUTOMATIC:
        return Axis(name, _AUTOMATIC[name](context))
    allowed = f' or "{AUTO}"' if name in _AUTOMATIC else ""
    entries = _entries(raw, where, allowed)
    return _axis(name, [NAMED_AXES[name](entry, context, where) for entry in entries], where)


def _entries(raw: Any, where: str, allowed: str = "") -> list[Any]:
    if not isinstance(raw, list):
        raise InputError(f"{where} = {raw!r}: must be a list of values{allowed}")
    if not raw:
        raise InputError(f"{where}: the list is empty; give at least one value, or leave the axis out")
    return raw


def _axis(name: str, values: Sequence[AxisValue], where: str) -> Axis:
    labels = [value.label for value in values]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"{where}: {twice} is listed twice")
    return Axis(name, tuple(values))


def _choice(entry: Any, choices: Sequence[str], where: str) -> str:
    if not isinstance(entry, str) or entry not in choices:
        hint = did_you_mean(str(entry), choices)
        raise InputError(f"{where}: unknown value {entry!r}{hint}; values: {', '.join(choices)}")
    return entry


# --- a dotted key ---------------------------------------------------------------------------------


def _key_axis(name: str, raw: Any, context: AxisContext, where: str) -> Axis:
    if "." not in name:
        axes = sorted(NAMED_AXES)
        raise InputError(
            f"{where}: unknown axis{did_you_mean(name, axes)}; axes: {', '.join(axes)}, "
            "or any dotted torchtitan key such as training.dtype"
        )
    find_key(name, source=f"{context.source}: axes")
    if name.startswith(("model.name", "model.flavor", f"{MODEL_ARGS}.")):
        raise InputError(f"{where}: a search keeps the model; search each model by itself")
    if name == "training.global_batch_size":
        raise InputError(f"{where}: a search keeps the global batch; set [fixed] global_batch_size")
    if is_bookkeeping(name):
        raise InputError(f"{where}: {name} does not change what is computed, so there is nothing to search")
    values = [check_value(name, entry, source=f"{context.source}: axes") for entry in _entries(raw, where)]
    return _axis(name, [AxisValue(_label(value), {name: value}) for value in values], where)


def _label(value: Value) -> str:
    """A value as TOML writes it, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_label, value)) + "]"
    return str(value)


# --- activation_checkpoint, compile, float8 ---------------------------------------------------------

_AC = "activation_checkpoint."
_AC_FORMS = ("none", "full", "selective-op", "selective-<n>", "memory_budget-<0..1>")


def _activation_checkpoint(entry: Any, context: AxisContext, where: str) -> AxisValue:
    """``none``, ``full``, ``selective-op``, ``selective-2``, ``memory_budget-0.5``."""
    mode, _, option = entry.partition("-") if isinstance(entry, str) else ("", "", "")
    if entry in (AcMode.NONE, AcMode.FULL):
        return AxisValue(entry, {_AC + "mode": entry})
    if mode == AcMode.SELECTIVE and (option == "op" or option.isdecimal()):
        checked = check_value(_AC + "selective_ac_option", option, source=where)
        return AxisValue(entry, {_AC + "mode": mode, _AC + "selective_ac_option": checked})
    if mode == AcMode.MEMORY_BUDGET:
        try:
            budget = check_value(_AC + "memory_budget", float(option), source=where)
        except ValueError:
            raise InputError(f"{where}: {entry!r}: the budget must be a number from 0 to 1") from None
        return AxisValue(entry, {_AC + "mode": mode, _AC + "memory_budget": budget})
    hint = did_you_mean(str(entry), ("none", "full", "selective-op", "selective-2", "memory_budget-0.5"))
    raise InputError(f"{where}: unknown value {entry!r}{hint}; values: {', '.join(_AC_FORMS)}")


def _compile(entry: Any, context: AxisContext, where: str) -> AxisValue:
    """``off``, or a mode of ``torch.compile``."""
    choice = _choice(entry, ("off", *CompileMode), where)
    if choice == "off":
        return AxisValue(choice, {"compile.enable": False})
    return AxisValue(choice, {"compile.enable": True, "titan_tune.compile_mode": str(choice)})


_F8 = "quantize.linear.float8."
_FLOAT8 = {
    "off": None,
    "tensorwise": None,
    "rowwise": "rowwise",
    "rowwise_with_gw_hp": "rowwise_with_gw_hp",
    "tensorwise-fsdp_all_gather": None,
}
"""Label → ``recipe_name``. Tensorwise leaves it unset: a name excludes the float8 all-gather."""


def _float8(entry: Any, context: AxisContext, where: str) -> AxisValue:
    """``off`` or a recipe; other converters of the base stay, the output layer stays in bf16."""
    choice = _choice(entry, tuple(_FLOAT8), where)
    base = context.base
    others = [name for name in base.get("model.converters") if name != "quantize.linear.float8"]
    if choice == "off":
        return AxisValue(choice, {"model.converters": others})
    all_gather = choice.endswith("fsdp_all_gather")
    filter_fqns = base.get(_F8 + "filter_fqns") if _F8 + "filter_fqns" in base.values else ["output"]
    return AxisValue(
        choice,
        {
            "model.converters": [
                "quantize.linear.float8",
                *(name for name in others if name != "quantize.linear.mx"),
            ],
            _F8 + "recipe_name": _FLOAT8[choice],
            _F8 + "enable_fsdp_float8_all_gather": all_gather,
            _F8 + "precompute_float8_dynamic_scale_for_fsdp": all_gather,
            _F8 + "filter_fqns": filter_fqns,
        },
    )


# --- local_batch_size -------------------------------------------------------------------------------

_LOCAL_BATCH = "training.local_batch_size"


def _local_batch(entry: Any, context: AxisContext, where: str) -> AxisValue:
    value = check_value(_LOCAL_BATCH, entry, source=where)
    return AxisValue(str(value), {_LOCAL_BATCH: value})


def _auto_local_batch(context: AxisContext) -> tuple[AxisValue, ...]:
    """Powers of two up to the global batch: what one data-parallel rank may hold of it."""
    sizes = [2**power for power in range(context.global_batch_size.bit_length())]
    return tuple(AxisValue(str(size), {_LOCAL_BATCH: size}) for size in sizes)


# --- parallelism --------------------------------------------------------------------------------------

_P = "parallelism."
_SHORT_NAMES = {
    "dp_replicate": _P + "data_parallel_replicate_degree",
    "dp_shard": _P + "data_parallel_shard_degree",
    "tp": _P + "tensor_parallel_degree",
    "pp": _P + "pipeline_parallel_degree",
    "cp": _P + "context_parallel_degree",
    "ep": _P + "expert_parallel_degree",
    "etp": _P + "expert_tensor_parallel_degree",
    "schedule": _P + "pipeline_parallel_schedule",
    "microbatch": _P + "pipeline_parallel_microbatch_size",
}
_DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp")


def _parallelism(entry: Any, context: AxisContext, where: str) -> AxisValue:
    """An inline table such as ``{dp_shard = 4, tp = 2}``; degrees left out are 1, ``dp_shard`` takes what
    is left over."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {entry!r} must be a table such as {{dp_shard = 4, tp = 2}}")
    unknown = next((name for name in entry if name not in _SHORT_NAMES), None)
    if unknown is not None:
        hint = did_you_mean(unknown, _SHORT_NAMES)
        raise InputError(f"{where}: unknown key {unknown!r}{hint}; keys: {', '.join(_SHORT_NAMES)}")
    checked = {name: check_value(_SHORT_NAMES[name], value, source=where) for name, value in entry.items()}
    if checked.get("dp_shard", -1) == -1:
        rest = 1
        for name in ("dp_replicate", "tp", "pp", "cp"):
            rest *= checked.get(name, 1)
        checked["dp_shard"] = max(1, context.cluster.world_size // rest)
    return _layout(checked)


def _layout(short: Mapping[str, Value]) -> AxisValue:
    """A layout by short names, as an axis value that sets every degree."""
    named = [f"{name}={short[name]}" for name in _DEGREES if short.get(name, 1) != 1]
    named += [f"{name}={short[name]}" for name in ("schedule", "microbatch") if name in short]
    degrees = {_SHORT_NAMES[name]: short.get(name, 1) for name in _DEGREES}
    return AxisValue(
        ",".join(named) or "single", degrees | {_SHORT_NAMES[name]: value for name, value in short.items()}
    )


def _auto_parallelism(context: AxisContext) -> tuple[AxisValue, ...]:
    """Every factorisation of the ranks into the degrees that the model family supports."""
    model = context.base.model
    return tuple(map(_layout, _factorisations(model, context.cluster.world_size)))


def _factorisations(model: ModelSpec, world_size: int) -> Iterator[dict[str, int]]:
    has_pipeline, has_context = model.name not in FAMILIES_WITHOUT_PIPELINE, model.name != "gpt_oss"
    for pp in _divisors(world_size) if has_pipeline else (1,):
        for tp in _divisors(world_size // pp):
            for cp in _divisors(world_size // (pp * tp)) if has_context else (1,):
                for dp_replicate in _divisors(world_size // (pp * tp * cp)):
                    shard = world_size // (pp * tp * cp * dp_replicate)
                    dense = {"dp_replicate": dp_replicate, "dp_shard": shard, "tp": tp, "pp": pp, "cp": cp}
                    yield dense
                    if model.moe is not None:
                        ranks = world_size // (pp * dp_replicate)
                        yield from _expert_degrees(dense, ranks, model.moe.num_experts)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _expert_degrees(dense: Mapping[str, int], ranks: int, num_experts: int) -> Iterator[dict[str, int]]:
    """The layout with every expert-parallel degree > 1 that its ranks and the experts allow."""
    for etp in sorted({1, dense["tp"]}):
        for ep in _divisors(ranks // etp) if ranks % etp == 0 else ():
            if ep > 1 and num_experts % ep == 0:
                yield {**dense, "ep": ep, "etp": etp}


NAMED_AXES: Mapping[str, Callable[[Any, AxisContext, str], AxisValue]] = {
    "activation_checkpoint": _activation_checkpoint,
    "compile": _compile,
    "float8": _float8,
    "local_batch_size": _local_batch,
    "parallelism": _parallelism,
}
"""Axes with a name of their own → how one entry of their list is read."""

_AUTOMATIC: Mapping[str, Callable[[AxisContext], tuple[AxisValue, ...]]] = {
    "local_batch_size": _auto_local_batch,
    "parallelism": _auto_parallelism,
}
