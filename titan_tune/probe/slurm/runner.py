"""The two runners: jobs of a queue, and steps of an allocation."""

from __future__ import annotations

import getpass
import hashlib
import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeSpec
from titan_tune.errors import InputError
from titan_tune.probe.classify import StopReason
from titan_tune.probe.slurm.batch import BatchJobs
from titan_tune.probe.slurm.commands import Commands
from titan_tune.probe.slurm.environment import command_environment
from titan_tune.probe.slurm.jobs import Jobs
from titan_tune.probe.slurm.monitor import Monitor
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.notes import JobNote, job_label
from titan_tune.probe.slurm.patience import Patience
from titan_tune.probe.slurm.probe import JobProbe
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.probe.slurm.steps import Allocation, AllocationSteps
from titan_tune.probe.toml import check_steps

POLL_SECONDS: Final = 3.0
"""Between two ``squeue`` of a search, for all its jobs. What ranks write is seen without it."""
STEP_POLL_SECONDS: Final = 0.2
"""Steps are children of this process: looking costs nothing."""


class _JobRunner:
    """Starts probes as jobs and ends them; see ``Runner``."""

    name: str

    def __init__(
        self,
        jobs: Jobs,
        ledger: NodeLedger,
        *,
        study: str,
        slots: int,
        patience: Patience,
        poll_seconds: float,
    ) -> None:
        self.slots = slots
        self._jobs, self._ledger, self._study, self._patience = jobs, ledger, study, patience
        self._monitor = Monitor(jobs.listing, interval=poll_seconds)
        self._probes: list[JobProbe] = []

    def start(self, spec: ProbeSpec) -> JobProbe:
        """Submit the probe and return at once. What an earlier run left in its folder is set aside.

        Raises InputError where the spec leaves no measured step.
        """
        check_steps(spec.settings)
        return self._probe(spec)

    def close(self) -> None:
        """Cancel everything started here and wait until it is gone."""
        for probe in self._probes:
            probe.request_stop(StopReason.CANCELLED)
        for probe in self._probes:
            probe.cancel()
        self._probes = []
        self._monitor.close()

    def __enter__(self) -> _JobRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _probe(self, spec: ProbeSpec, found: JobNote | None = None) -> JobProbe:
        self._probes = [probe for probe in self._probes if probe.outcome is None]
        probe = JobProbe(
            spec,
            self._jobs,
            self._monitor,
            self._ledger,
            self._patience,
            job_label(self._study, spec.directory),
            lane=next(lane for lane in itertools.count() if lane not in {p.lane for p in self._probes}),
            found=found,
        )
        self._probes.append(probe)
        return probe


class SlurmRunner(_JobRunner):
    """Keeps up to ``slots`` jobs in the queue. Its jobs outlive the search: see ``DetachableRunner``."""

    name = "slurm"

    def __init__(
        self,
        settings: SlurmSettings,
        *,
        directory: Path,
        slots: int = 1,
        study: str = "",
        environ: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        poll_seconds: float = POLL_SECONDS,
        command_seconds: float | None = None,
    ) -> None:
        """``directory`` is the study's, on a file system that all nodes share. ``environ`` reaches Slurm's commands
        (by default this process's)."""
        environ = dict(os.environ) if environ is None else environ
        commands = _commands(command_environment(environ), command_seconds)
        ledger = NodeLedger()
        jobs = BatchJobs(
            settings, commands, ledger, cache_directory(settings, directory), environ, Path.cwd()
        )
        patience = patience or Patience(pending=settings.pending_deadline_seconds)
        super().__init__(jobs, ledger, study=study, slots=slots, patience=patience, poll_seconds=poll_seconds)
        self._commands = commands

    def find(self, spec: ProbeSpec) -> str | None:
        """The id of the job that an earlier search submitted for ``spec.directory``, or ``None``.

        Raises UnreachableError where that search did not come to note the id and the controller is away.
        """
        note = JobNote.read(spec.directory)
        return None if note is None else note.job_id or self._commands.job_named(note.name)

    def attach(self, spec: ProbeSpec) -> JobProbe | None:
        """The probe of ``spec.directory`` as an earlier search left it; ``None`` where it submitted none.

        Whether a job was submitted whose id was never noted is asked on the side: where Slurm knows none by its name,
        the probe ends as cancelled.
        """
        note = JobNote.read(spec.directory)
        return None if note is None else self._probe(spec, note)

    def detach(self) -> None:
        """Leave the jobs alone from now on, in the queue or running."""
        self._probes = []


class AllocationRunner(_JobRunner):
    """Runs probes side by side in the job that the search itself runs in."""

    name = "allocation"

    def __init__(
        self,
        settings: SlurmSettings,
        allocation: Allocation,
        *,
        directory: Path,
        slots: int,
        study: str = "",
        patience: Patience | None = None,
    ) -> None:
        """``directory`` is the study's, on a file system that all nodes share."""
        ledger = NodeLedger()
        commands = _commands(command_environment(os.environ), None)
        jobs = AllocationSteps(
            allocation, settings, commands, ledger, cache_directory(settings, directory), workdir=Path.cwd()
        )
        super().__init__(
            jobs,
            ledger,
            study=study,
            slots=slots,
            patience=patience or Patience(settle=5.0),
            poll_seconds=STEP_POLL_SECONDS,
        )


def make_runner(
    settings: SlurmSettings, *, cluster: ClusterSpec, device: str, slots: int, study: str, directory: Path
) -> SlurmRunner:
    """The runner of ``--runner slurm``. Raises InputError where Slurm's commands are not here."""
    _check_programs("sbatch", "squeue", "scancel", "scontrol", "sinfo")
    return SlurmRunner(settings, directory=directory, slots=slots, study=study)


def make_allocation_runner(
    settings: SlurmSettings,
    *,
    cluster: ClusterSpec,
    device: str,
    slots: int | None,
    study: str,
    directory: Path,
) -> AllocationRunner:
    """The runner of ``--runner allocation``; ``slots`` is by default as many as the allocation has room for.

    Raises InputError outside of an allocation, and where the cluster's shape does not fit into it.
    """
    _check_programs("srun", "squeue", "scancel", "scontrol", "sinfo")
    if "SLURM_JOB_ID" not in os.environ:
        raise InputError(
            "--runner allocation: this is no Slurm allocation (SLURM_JOB_ID is not set); use salloc"
        )
    commands = Commands(command_environment(os.environ))
    nodes = commands.node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    allocation = Allocation.read(os.environ, nodes)
    room = allocation.slots(device, num_nodes=cluster.num_nodes, ranks_per_node=cluster.gpus_per_node)
    if room == 0:
        raise InputError(
            f"--runner allocation: a probe needs {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs; job "
            f"{allocation.job_id} has {len(nodes)} nodes of {allocation.gpus_per_node or 'unknown'} GPUs"
        )
    if slots is not None and slots > room:
        raise InputError(f"--parallel {slots}: job {allocation.job_id} has room for {room} probes at a time")
    return AllocationRunner(
        settings, allocation, directory=directory, slots=room if slots is None else slots, study=study
    )


def cache_directory(settings: SlurmSettings, directory: Path) -> str:
    """Where ranks keep compiled code on their node, before the lane is added: the site's folder, or one in /tmp."""
    if settings.cache_directory is not None:
        return settings.cache_directory
    mark = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    return f"/tmp/titan-tune-{getpass.getuser()}-{mark}"


def _commands(environ: Mapping[str, str], seconds: float | None) -> Commands:
    return Commands(environ) if seconds is None else Commands(environ, seconds)


def _check_programs(*names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"--runner needs Slurm's {', '.join(missing)} on PATH; submit from a node that has them"
        )
