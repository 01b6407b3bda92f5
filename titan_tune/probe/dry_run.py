"""Probes of a job of many GPUs on few: one process a simulated rank, without peers.

A probe's ranks take the machine's GPUs one each as they become free, so that probes without a pipeline run
side by side and the ranks of one with a pipeline do too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSettings, ProbeSpec, ProbeStatus
from titan_tune.domain.settings import Settings
from titan_tune.errors import InputError
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.probe import files
from titan_tune.probe.classify import StopReason
from titan_tune.probe.dry_run_model import (
    RANK_CHOICES,
    WORST,
    RankRun,
    gpu_factor,
    predict,
    ranks_to_run,
    read_run,
)
from titan_tune.probe.dry_run_outcome import failed_outcome, measured_outcome, validity_outcome
from titan_tune.probe.local import LocalProbe, LocalRunner
from titan_tune.probe.record import write_outcome, write_whole
from titan_tune.probe.slots import VISIBLE_DEVICES
from titan_tune.titan.job import Job, job_from_text, render
from titan_tune.titan.plugin.environment import DRY_RUN_RANK
from titan_tune.titan.settings import resolve

NAME: Final = "dry-run"

STEPS: Final = 8
WARMUP_STEPS: Final = 2
"""The second is the one whose collectives are counted."""
MIN_MEASURED_STEPS: Final = 3
"""A rank alone waits for nobody: its steps vary less than a job's."""
ENOUGH_SECONDS: Final = 60.0
"""From here on one measured step is enough."""
CPU_STEPS: Final = 2

RANK_DIRECTORY: Final = "rank{}"
OPENMP_THREADS: Final = "OMP_NUM_THREADS"


class DryRunner:
    """Simulates jobs for ``cluster`` on the GPUs of ``machine``, or on its processor, where it checks validity
    alone; a context manager. Every spec has the target's nodes and processes."""

    name = NAME
    gpus_per_probe = 1
    """A probe's ranks take turns on the GPUs: budgets count one, whatever the job has."""

    def __init__(
        self,
        cluster: ClusterSpec,
        machine: ClusterSpec,
        *,
        launcher: str | None = None,
        ranks: str = WORST,
        devices: Sequence[str] | None = None,
        runner: LocalRunner | None = None,
    ) -> None:
        """``ranks``: every pipeline rank (all) or those that can be the worst. ``devices``: values of
        CUDA_VISIBLE_DEVICES, one a simulated rank in flight; this machine's GPUs unless given. ``runner`` starts
        one process a spec; ``launcher`` as in :class:`LocalRunner`."""
        if ranks not in RANK_CHOICES:
            raise InputError(f"ranks={ranks!r} is not one of {', '.join(RANK_CHOICES)}")
        self.cluster, self.machine, self.ranks = cluster, machine, ranks
        self.device = "cpu" if machine.gpu.is_cpu else "cuda"
        self._runner = runner or LocalRunner(1, self.device, launcher=launcher)
        self._free: list[str | None] = list(devices or _visible_devices(machine))
        self.slots = len(self._free)
        self._probes: list[DryRunProbe] = []

    def start(self, spec: ProbeSpec) -> DryRunProbe:
        """Launch the probe's ranks as GPUs are free, and return at once.

        Raises InputError where the spec's file is no job for the target.
        """
        job = job_from_text(spec.toml, name=files.CONFIG)
        settings = resolve(job, self.cluster)
        if spec.world_size != settings.dims.world_size:
            raise InputError(
                f"{files.CONFIG}: its degrees make {settings.dims.world_size} ranks, the probe is for {spec.world_size}"
            )
        self._probes = [probe for probe in self._probes if probe.poll() is None]
        waiting = [
            _Rank(rank, rank_spec(spec, job, settings, rank, self.device))
            for rank in ranks_to_run(settings, self.ranks)
        ]
        probe = DryRunProbe(self, spec, settings, waiting)
        self._probes.append(probe)
        return probe

    def launch(self, spec: ProbeSpec) -> tuple[LocalProbe, str | None] | None:
        """A rank's process on a free device, or ``None`` while there is none."""
        if not self._free:
            return None
        device = self._free.pop(0)
        if device is not None:
            spec = replace(spec, environment=(*spec.environment, (VISIBLE_DEVICES, device)))
        return self._runner.start(spec), device

    def release(self, device: str | None) -> None:
        """The device is free again."""
        self._free.append(device)

    def close(self) -> None:
        """Cancel and reap everything started here."""
        for probe in self._probes:
            probe.cancel()
        self._probes = []
        self._runner.close()

    def __enter__(self) -> DryRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _visible_devices(machine: ClusterSpec) -> list[str | None]:
    if machine.gpu.is_cpu:
        return [None]
    given = os.environ.get(VISIBLE_DEVICES)
    return list(given.split(",")) if given else [str(index) for index in range(machine.gpus_per_node)]


def rank_spec(spec: ProbeSpec, job: Job, settings: Settings, rank: int, device: str) -> ProbeSpec:
    """The spec of one process that is ``rank`` of the job."""
    short = dry_run_settings(spec.settings, device)
    directory = spec.directory / RANK_DIRECTORY.format(rank)
    values: dict[str, Value] = {
        "comm.mode": "fake_backend",
        "training.steps": short.steps,
        "job.dump_folder": str(directory / files.OUTPUTS),
    }
    if settings.dims.ep > 1:
        values["debug.moe_force_load_balance"] = True
    return replace(
        spec,
        directory=directory,
        toml=render(job, values),
        nproc_per_node=1,
        num_nodes=1,
        device=device,
        settings=short,
        baseline_losses=(),
        beat=None,
        environment=(
            *spec.environment,
            (DRY_RUN_RANK, str(rank)),
            ("NGPU", str(spec.world_size)),
            *_threads(spec, device),
        ),
    )


def _threads(spec: ProbeSpec, device: str) -> tuple[tuple[str, str], ...]:
    """torchrun gives a process one OpenMP thread where it starts several on a node, unless told otherwise: the
    ranks of the job would have one, so the one that runs alone has no more."""
    if spec.nproc_per_node == 1 or (device == "cuda" and OPENMP_THREADS in os.environ):
        return ()
    return ((OPENMP_THREADS, "1"),)


def dry_run_settings(settings: ProbeSettings, device: str) -> ProbeSettings:
    """The probe's settings with the few steps that a dry run needs."""
    steps, warmup = (CPU_STEPS, CPU_STEPS - 1) if device == "cpu" else (STEPS, WARMUP_STEPS)
    return settings.model_copy(
        update={"steps": steps, "warmup_steps": warmup, "min_measured_steps": MIN_MEASURED_STEPS}
    )


@dataclass(slots=True)
class _Rank:
    """One simulated rank of a probe."""

    rank: int
    spec: ProbeSpec
    probe: LocalProbe | None = None
    device: str | None = None
    began: float = 0.0
    outcome: ProbeOutcome | None = None

    @property
    def runs(self) -> bool:
        return self.probe is not None and self.outcome is None


@dataclass(slots=True)
class DryRunProbe:
    """One simulated job in flight; see ``ProbeHandle``. Work is done in ``poll``."""

    runner: DryRunner
    spec: ProbeSpec
    settings: Settings
    ranks: list[_Rank]
    outcome: ProbeOutcome | None = None
    _began: float = field(default_factory=time.monotonic)
    _ended: float | None = None

    def __post_init__(self) -> None:
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        files.set_aside(self.spec.directory, "earlier")
        write_whole(self.spec.directory / files.CONFIG, self.spec.toml)
        self._launch()

    def poll(self) -> ProbeOutcome | None:
        """The outcome once every simulated rank has ended, or one has failed and the others are stopped."""
        if self.outcome is not None:
            return self.outcome
        for item in self.ranks:
            self._poll_rank(item)
        failed = next((item for item in self.ranks if _has_failed(item)), None)
        if failed is not None:
            self._stop(StopReason.CANCELLED)
            if not any(item.runs for item in self.ranks):
                assert failed.outcome is not None
                self._conclude(
                    failed_outcome(
                        self.settings,
                        self.runner.machine,
                        failed.rank,
                        failed.outcome,
                        seconds=self._seconds(),
                    )
                )
        elif all(item.outcome is not None for item in self.ranks):
            self._conclude(self._completed())
        else:
            self._launch()
        return self.outcome

    def progress(self) -> ProbeProgress:
        """What the first running rank is doing; steps are those of all ranks."""
        shown = [item.probe.progress() for item in self.ranks if item.probe is not None]
        running = [item.probe.progress() for item in self.ranks if item.runs and item.probe is not None]
        phase = "stopping" if self.outcome is not None else running[0].phase if running else "starting"
        return ProbeProgress(
            phase=phase,
            step=sum(found.step for found in shown),
            steps=sum(item.spec.settings.steps for item in self.ranks),
            tokens_per_second=None,
            seconds=self._seconds(),
        )

    def running_ranks(self) -> tuple[int, ...]:
        """Global ranks whose processes run now."""
        return tuple(item.rank for item in self.ranks if item.runs)

    def cancel(self) -> ProbeOutcome:
        """Stop every process, wait until they are gone, and return the outcome."""
        if self.poll() is None:
            self._stop(StopReason.CANCELLED)
            for item in self.ranks:
                if item.runs and item.probe is not None:
                    item.probe.cancel()
                    self._poll_rank(item)
            self._conclude(ProbeOutcome(ProbeStatus.CANCELLED, "stopped by the search", self._seconds()))
        assert self.outcome is not None
        return self.outcome

    def _launch(self) -> None:
        for item in self.ranks:
            if item.probe is None:
                launched = self.runner.launch(item.spec)
                if launched is None:
                    return
                item.probe, item.device = launched
                item.began = time.monotonic()

    def _poll_rank(self, item: _Rank) -> None:
        if not item.runs or item.probe is None:
            return
        item.outcome = item.probe.poll()
        if item.outcome is not None:
            self.runner.release(item.device)
        elif (
            time.monotonic() - item.began > ENOUGH_SECONDS
            and item.spec.settings.warmup_steps < item.probe.progress().step < item.spec.settings.steps
        ):
            item.probe.request_stop(StopReason.EARLY)

    def _stop(self, reason: StopReason) -> None:
        for item in self.ranks:
            if item.runs and item.probe is not None:
                item.probe.request_stop(reason)

    def _completed(self) -> ProbeOutcome:
        outcomes = [item.outcome for item in self.ranks if item.outcome is not None]
        if self.runner.machine.gpu.is_cpu:
            ranks = [item.rank for item in self.ranks]
            return validity_outcome(self.settings, ranks, outcomes, seconds=self._seconds())
        runs = [self._run(item) for item in self.ranks]
        prediction = predict(
            self.settings,
            runs,
            interconnect_of(self.settings.cluster),
            gpu_factor=gpu_factor(self.settings, self.runner.machine),
        )
        return measured_outcome(
            self.settings,
            self.runner.machine,
            runs,
            outcomes,
            prediction,
            tokens_per_step_per_rank=self.spec.tokens_per_step_per_rank,
            seconds=self._seconds(),
        )

    def _run(self, item: _Rank) -> RankRun:
        directory = item.spec.directory
        metrics = files.Metrics(directory)
        metrics.read_new()
        return read_run(
            directory / f"collectives.rank{item.rank}.json",
            self.settings.dims,
            metrics.memory()[0],
            metrics.logs[item.rank].steps,
            warmup=item.spec.settings.warmup_steps,
        )

    def _conclude(self, outcome: ProbeOutcome) -> None:
        """``details["gpu_seconds"]``: what it really took of GPUs, whatever the job would take."""
        self._ended = time.monotonic()
        used = sum(item.outcome.seconds for item in self.ranks if item.outcome is not None)
        outcome = replace(outcome, details={**outcome.details, "gpu_seconds": used})
        write_outcome(self.spec.directory, outcome)
        self.outcome = outcome

    def _seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._began


def _has_failed(item: _Rank) -> bool:
    """A rank that another's failure stopped is cancelled, and no failure of its own."""
    return item.outcome is not None and item.outcome.status not in (
        ProbeStatus.COMPLETED,
        ProbeStatus.CANCELLED,
    )
