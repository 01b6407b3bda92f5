"""From ``--runner`` to a runner. Each one is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError, did_you_mean
from titan_tune.probe.runner import Runner

if TYPE_CHECKING:
    from titan_tune.probe.slurm.settings import SlurmSettings


@dataclass(frozen=True)
class RunnerRequest:
    """What a runner is made for."""

    cluster: ClusterSpec
    """The job's."""
    machine: ClusterSpec
    """This machine."""
    device: str
    """``cuda`` or ``cpu``."""
    study: str
    directory: Path
    """The study's folder."""
    parallel: int | None = None
    """Probes in flight at once; ``None`` leaves it to the runner."""
    slurm: Mapping[str, Any] = field(default_factory=dict)
    """The ``[slurm]`` table of the space file, unchecked."""
    source: str = "[slurm]"
    """What to call that table in an error."""


def make_runner(name: str, request: RunnerRequest) -> Runner:
    """The runner called ``name``.

    Raises:
        InputError: there is no such runner, or it cannot run such probes here.
    """
    check_runner(name)
    return RUNNERS[name](request)


def check_runner(name: str) -> None:
    """Raise InputError unless there is a runner of that name."""
    if name not in RUNNERS:
        known = ", ".join(RUNNERS)
        raise InputError(f"--runner: {name!r} is not one of: {known}{did_you_mean(name, RUNNERS)}")


def needs_this_machines_devices(name: str) -> bool:
    """Whether the probes run on this machine, and need its packages."""
    return name in ("local", "dry-run")


def _local(request: RunnerRequest) -> Runner:
    from titan_tune.probe.local import LocalRunner
    from titan_tune.probe.slots import SlicedRunner, device_slices, visible_devices

    cluster, machine = request.cluster, request.machine
    if cluster.num_nodes > 1:
        raise InputError(f"--runner local runs on one node, the job asks for {cluster.num_nodes}")
    if cluster.gpu.is_cpu != machine.gpu.is_cpu:
        raise InputError(
            f"--runner local: the job is for {cluster.gpu.name}, this machine has {machine.gpu.name}; name another"
            " with --gpu, submit it with --runner slurm, or only look at the candidates with --plan"
        )
    if not machine.gpu.is_cpu and cluster.gpus_per_node > machine.gpus_per_node:
        raise InputError(
            f"--runner local: the job needs {cluster.gpus_per_node} GPUs, this machine has {machine.gpus_per_node}; "
            "name fewer with --gpus, measure single ranks with --runner dry-run, or submit it with --runner slurm"
        )
    runner = LocalRunner(cluster.gpus_per_node, request.device)
    slots = request.parallel or 1
    if slots == 1:
        return runner
    if request.device == "cpu":
        return SlicedRunner(runner, [None] * slots)
    visible = visible_devices(machine.gpus_per_node)
    try:
        return SlicedRunner(runner, device_slices(visible, per_probe=cluster.gpus_per_node, slots=slots))
    except ValueError as error:
        raise InputError(f"--parallel {slots}: {error}") from None


def _slurm(request: RunnerRequest) -> Runner:
    from titan_tune.probe.slurm import make_runner as make

    return make(
        slurm_settings(request.slurm, request.source),
        cluster=request.cluster,
        device=request.device,
        slots=request.parallel or 1,
        study=request.study,
        directory=request.directory,
    )


def _allocation(request: RunnerRequest) -> Runner:
    from titan_tune.probe.slurm import make_allocation_runner

    return make_allocation_runner(
        slurm_settings(request.slurm, request.source),
        cluster=request.cluster,
        device=request.device,
        slots=request.parallel,
        study=request.study,
        directory=request.directory,
    )


def _dry_run(request: RunnerRequest) -> Runner:
    from titan_tune.probe.dry_run import DryRunner
    from titan_tune.probe.slots import visible_devices

    if request.machine.gpu.is_cpu:
        raise InputError(
            "--runner dry-run: this machine has no GPU: a dry run would tell neither speed nor memory"
        )
    devices = None
    if request.parallel is not None:
        devices = visible_devices(request.machine.gpus_per_node)[: request.parallel]
    return DryRunner(request.cluster, request.machine, devices=devices)


def slurm_settings(table: Mapping[str, Any], source: str) -> SlurmSettings:
    """The ``[slurm]`` table, checked.

    Raises:
        InputError: an unknown key (with the valid ones) or a wrong value.
    """
    from titan_tune.probe.slurm.settings import SlurmSettings

    known = tuple(SlurmSettings.model_fields)
    unknown = next((name for name in table if name not in known), None)
    if unknown is not None:
        raise InputError(
            f"{source}: unknown key {unknown!r}{did_you_mean(unknown, known)}; keys: {', '.join(known)}"
        )
    try:
        return SlurmSettings.model_validate(dict(table), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"{source}.{name} = {first['input']!r}: {message}") from None


RUNNERS: dict[str, Callable[[RunnerRequest], Runner]] = {
    "local": _local,
    "slurm": _slurm,
    "allocation": _allocation,
    "dry-run": _dry_run,
}
