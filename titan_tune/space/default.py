"""The space of a plain job file: the default axes around the job's own values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeSettings
from titan_tune.space.axes import Axis, AxisValue, Budget, Space
from titan_tune.space.enumerate import BASE_LABEL, includes_base
from titan_tune.space.named_axes import AUTO, AxisContext, build_axis
from titan_tune.titan.job import Job
from titan_tune.titan.settings import resolve

DEFAULT_AXES: Mapping[str, Any] = {
    "activation_checkpoint": ["none", "selective-op", "selective-2", "full", "memory_budget-0.5"],
    "compile": ["off", "default"],
    "parallelism": AUTO,
    "local_batch_size": AUTO,
}


def space_from_job(
    job: Job,
    cluster: ClusterSpec,
    *,
    axes: Mapping[str, Any] | None = None,
    global_batch_size: int | None = None,
    budget: Budget | None = None,
    probe: ProbeSettings | None = None,
) -> Space:
    """The default space of a job: activation checkpointing, compile, parallelism, local batch.

    ``axes`` are further axes (or replacements) as a space file writes them, e.g.
    ``{"float8": ["off", "rowwise"]}``: whatever changes the numerics is searched only when named. The
    job's own values are always among each axis's.

    Raises:
        InputError: an axis that does not exist, or a value that it does not take.
    """
    global_batch = global_batch_size or resolve(job, cluster).global_batch_size
    context = AxisContext(job, cluster, global_batch, job.name)
    chosen = {**DEFAULT_AXES, **(axes or {})}
    if cluster.world_size == 1 and "parallelism" not in (axes or {}):
        del chosen["parallelism"]
    space = Space(
        base=job,
        cluster=cluster,
        axes=tuple(build_axis(name, raw, context) for name, raw in chosen.items()),
        global_batch_size=global_batch,
        budget=budget or Budget(),
        probe=probe or ProbeSettings(),
        path=job.path,
    )
    return replace(space, axes=tuple(_with_base(axis, space) for axis in space.axes))


def _with_base(axis: Axis, space: Space) -> Axis:
    """The axis, with the base job's own values in front unless they are there already."""
    if includes_base(axis, space):
        return axis
    own = space.base.resolved()
    return Axis(
        axis.name, (AxisValue(BASE_LABEL, {key: own[key] for key in sorted(axis.keys)}), *axis.values)
    )
