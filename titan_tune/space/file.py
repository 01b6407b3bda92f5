"""Search-space files (``search_spaces/*.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import MAX_WORLD_SIZE, ClusterSpec
from titan_tune.domain.probe import ProbeSettings
from titan_tune.errors import InputError, did_you_mean
from titan_tune.space.axes import Axis, Budget, Space
from titan_tune.space.named_axes import NAMED_AXES, AxisContext, build_axis
from titan_tune.titan.job import Job, job_from_text, load_job, parse_toml, read_text
from titan_tune.titan.keys import parse_assignment
from titan_tune.titan.settings import resolve

TABLES = ("base", "cluster", "axes", "fixed", "budget", "probe", "slurm")
CPU = "cpu"
"""``[cluster] gpu = "cpu"``: processes on this machine's processor."""


def is_space_file(path: Path | str) -> bool:
    """Whether the file is meant as a search space (it has ``base`` or ``[axes]``) and not as a job.

    A file that cannot be read or parsed is no space: loading it as a job says what is wrong with it.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return not tables.keys().isdisjoint(("base", "axes"))


def load_space(
    path: Path | str,
    *,
    cluster: ClusterSpec | None = None,
    machine: ClusterSpec | None = None,
    sets: Sequence[str] = (),
    hf_config: Path | None = None,
) -> Space:
    """Read a search-space file.

    ``cluster`` (flags) wins over the file's ``[cluster]``; what neither names is ``machine``'s, which
    defaults to this machine. ``sets`` (``KEY=VALUE``) and ``hf_config`` change the base job.

    Raises:
        InputError: one line for a file that cannot be read, an unknown key anywhere (with the valid ones), a
            wrong value, or two axes that set the same key.
    """
    path = Path(path)
    source = str(path)
    tables = parse_toml(read_text(path), source=source)
    _known(tables, TABLES, source)
    if "base" not in tables or "axes" not in tables:
        missing = "base" if "base" not in tables else "axes"
        raise InputError(f"{source}: {missing} is missing; a search space has base (a job) and [axes]")
    base = _base(tables["base"], path, sets=sets, hf_config=hf_config)
    cluster = cluster or _cluster(_table(tables, "cluster", source), machine, source=f"{source}: cluster")
    global_batch = _global_batch(_table(tables, "fixed", source), base, cluster, source)
    context = AxisContext(base, cluster, global_batch, source)
    return Space(
        base=base,
        cluster=cluster,
        axes=_axes(_table(tables, "axes", source), context),
        global_batch_size=global_batch,
        budget=_fields(Budget, _table(tables, "budget", source), f"{source}: budget"),
        probe=_probe(_table(tables, "probe", source), f"{source}: probe"),
        path=path,
        slurm=_table(tables, "slurm", source),
    )


def _table(tables: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        raise InputError(f"{source}: {name} = {table!r}: must be a table, written [{name}]")
    return table


def _known(given: Iterable[str], valid: Sequence[str], where: str) -> None:
    unknown = next((name for name in given if name not in valid), None)
    if unknown is not None:
        raise InputError(
            f"{where}: unknown key {unknown!r}{did_you_mean(unknown, valid)}; keys: {', '.join(valid)}"
        )


def _base(raw: Any, path: Path, *, sets: Sequence[str], hf_config: Path | None) -> Job:
    """The base job: a path relative to the space file, or torchtitan's sections inline."""
    if isinstance(raw, str):
        try:
            return load_job(path.parent / raw, sets=sets, hf_config=hf_config)
        except InputError as error:
            raise InputError(f"{path}: base: {error}") from None
    if not isinstance(raw, Mapping):
        raise InputError(f"{path}: base = {raw!r}: must be the path of a job file, or a table [base]")
    if hf_config is not None:
        raise InputError(f"{path}: base is inline; --hf-config needs a base that is a job file")
    import tomlkit

    job = job_from_text(tomlkit.dumps(raw), name=f"{path}: base")
    if not sets:
        return job
    values = dict(parse_assignment(text, source="--set") for text in sets)
    try:
        return job.with_values(values)
    except InputError as error:
        given = " ".join(f"--set {text}" for text in sets)
        raise InputError(f"{path}: base with {given}: {error}") from None


def _cluster(table: Mapping[str, Any], machine: ClusterSpec | None, *, source: str) -> ClusterSpec:
    _known(table, ("gpu", "num_nodes", "gpus_per_node", "interconnect"), source)
    counts = {}
    for name in ("num_nodes", "gpus_per_node"):
        if name in table:
            counts[name] = _positive(table[name], f"{source}.{name}")
    found = _described_cluster(table, counts, machine, source)
    if "interconnect" in table:
        found = found.model_copy(update={"interconnect": _link(table["interconnect"], source)})
    if found.world_size > MAX_WORLD_SIZE:
        raise InputError(f"{source}: {found.world_size} GPUs; at most {MAX_WORLD_SIZE}")
    return found


def _described_cluster(
    table: Mapping[str, Any], counts: dict[str, int], machine: ClusterSpec | None, source: str
) -> ClusterSpec:
    """The cluster of a ``[cluster]`` table; what it leaves out is the machine's."""
    from titan_tune import machine as this_machine

    if table.get("gpu") == CPU:
        processes = counts.get("gpus_per_node", this_machine.CPU_PROCESSES)
        counts["gpus_per_node"] = processes
        return ClusterSpec(gpu=this_machine.cpu_spec(processes), **counts)
    if {"gpu", "gpus_per_node"} <= table.keys():
        return ClusterSpec(gpu=_gpu(table["gpu"], source), **counts)
    here = machine or this_machine.local_cluster()
    gpu = _gpu(table["gpu"], source) if "gpu" in table else here.gpu
    return ClusterSpec(gpu=gpu, **{"gpus_per_node": here.gpus_per_node, **counts})


def _gpu(name: Any, source: str) -> Any:
    if not isinstance(name, str):
        raise InputError(f"{source}.gpu = {name!r}: must be a GPU's name such as h200, or {CPU}")
    try:
        return gpu_spec(name)
    except InputError as error:
        raise InputError(f"{source}.gpu: {error}") from None


def _link(name: Any, source: str) -> str:
    """A link between nodes, by catalogue name."""
    from titan_tune.estimate.interconnect import link

    if not isinstance(name, str):
        raise InputError(f"{source}.interconnect = {name!r}: must be the name of a link, such as ib-ndr")
    try:
        link(name)
    except InputError as error:
        raise InputError(f"{source}.{error}") from None
    return name


def _positive(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where} = {value!r}: must be a whole number, 1 or more")
    return value


def _global_batch(table: Mapping[str, Any], base: Job, cluster: ClusterSpec, source: str) -> int:
    """``[fixed] global_batch_size`` in sequences, by default what the base job trains with here."""
    _known(table, ("global_batch_size",), f"{source}: fixed")
    if "global_batch_size" in table:
        return _positive(table["global_batch_size"], f"{source}: fixed.global_batch_size")
    return resolve(base, cluster).global_batch_size


def _axes(table: Mapping[str, Any], context: AxisContext) -> tuple[Axis, ...]:
    named = _flat(table)
    if not named:
        known = ", ".join(NAMED_AXES)
        raise InputError(f"{context.source}: [axes] is empty; axes: {known}, or any dotted torchtitan key")
    axes = tuple(build_axis(name, raw, context) for name, raw in named.items())
    owner: dict[str, str] = {}
    for axis in axes:
        for key in sorted(axis.keys):
            if owner.setdefault(key, axis.name) != axis.name:
                raise InputError(f"{context.source}: axes {owner[key]} and {axis.name} both set {key}")
    return axes


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``training.dtype = [...]``, written with or without quotes, under its dotted name."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _probe(table: Mapping[str, Any], where: str) -> ProbeSettings:
    probe = _fields(ProbeSettings, table, where)
    if probe.warmup_steps >= probe.steps:
        raise InputError(
            f"{where}.warmup_steps = {probe.warmup_steps}: leaves nothing to measure of steps = {probe.steps}"
        )
    return probe


Fields = TypeVar("Fields", bound=BaseModel)


def _fields(model: type[Fields], table: Mapping[str, Any], where: str) -> Fields:
    """A table as a pydantic model, its first error as one line."""
    _known(table, tuple(model.model_fields), where)
    try:
        return model.model_validate(dict(table), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{where}.{name} = {first['input']!r}: {message}") from None
