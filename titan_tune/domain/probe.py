"""A probe: what is asked of a runner, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from titan_tune.domain.base import FrozenModel


class ProbeStatus(StrEnum):
    """How a probe ended."""

    COMPLETED = "completed"
    OOM = "oom"
    DIVERGED = "diverged"
    UNSUPPORTED = "unsupported"
    COMPILE_FAILURE = "compile_failure"
    HANG = "hang"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    CANCELLED = "cancelled"

    @property
    def is_about_the_configuration(self) -> bool:
        """Whether the outcome may be held against the configuration."""
        return self not in (ProbeStatus.INFRASTRUCTURE, ProbeStatus.CANCELLED)


class Origin(StrEnum):
    """Where a throughput comes from."""

    MEASURED = "measured"
    """Every rank ran."""
    DRY_RUN = "dry run"
    """One rank of the job ran on one GPU; communication and pipeline bubble were computed."""


DRY_RUN_DETAILS: Final = frozenset({"dry_run", "simulated_rank", "gpu_seconds"})
"""Keys of ``ProbeOutcome.details`` that only dry runs have."""


class ProbeSettings(FrozenModel):
    """How a probe runs; the ``[probe]`` table of a search-space file."""

    steps: PositiveInt = 25
    warmup_steps: NonNegativeInt = 5
    min_measured_steps: PositiveInt = 8
    """Measured steps before an early stop is considered."""
    target_relative_interval: PositiveFloat = 0.01
    """Stop early once the bootstrap interval of the median is this narrow (full width / median)."""
    timeout_seconds: PositiveFloat = 1800.0
    """Wall clock of the whole probe."""
    hang_seconds: PositiveFloat = 300.0
    """No new step for this long after the first step is a hang."""
    startup_seconds: PositiveFloat = 1200.0
    """Time to the first step: imports, init and cold compilation."""
    retries: NonNegativeInt = 1
    """Further attempts after an infrastructure failure; never after any other."""
    data: str = Field(default="synthetic", pattern="^(synthetic|job)$")
    """``synthetic`` tokens (no tokenizer, no download) or the ``job``'s own dataset."""
    launcher: str = Field(default="preloaded", pattern="^(preloaded|torchrun)$")
    """``preloaded``: a local probe's processes are forked from one that has imported torchtitan already, or
    started by ``torchrun`` where that cannot be. Other runners do not read it."""
    runner: str = Field(default="local", pattern="^(local|slurm|allocation|dry-run)$")
    """Where probes run, unless ``--runner`` says."""
    screen: str = Field(default="none", pattern="^(none|dry-run)$")
    """What chooses among the candidates before real probes do: ``dry-run`` runs one rank of the job on one GPU."""
    finalists: NonNegativeInt = 3
    finalist_repeats: PositiveInt = 1
    loss_tolerance: PositiveFloat = 0.05
    """Largest relative gap to the baseline's loss, beyond the baseline's own noise."""


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One run, fully described. ``directory`` is the trial folder; everything it writes is there."""

    config_id: str
    directory: Path
    toml: str
    """The complete torchtitan file of the run."""
    nproc_per_node: int
    device: str
    """``cuda`` or ``cpu``."""
    settings: ProbeSettings
    cache_directory: Path
    """Compile caches, shared by the probes of a study; a folder per rank below it."""
    tokens_per_step_per_rank: float
    """Tokens of one optimizer step divided by the ranks of the job: throughput is this over time."""
    baseline_losses: tuple[float, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    num_nodes: int = 1
    beat: float | None = None
    """Tokens/s per GPU that the probe has to reach to be of use: it may be stopped once it cannot."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.nproc_per_node


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of ``metrics.rank*.jsonl``. Memory is peak bytes since the process began."""

    step: int
    loss: float
    grad_norm: float
    step_seconds: float
    tokens_per_second: float
    active_bytes: int
    reserved_bytes: int
    device_bytes: int
    alloc_retries: int
    ooms: int
    time: float
    """Unix time at the end of the step."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak memory of one rank, bytes. On CPU all three are resident set size."""

    rank: int
    active_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a completed probe measured."""

    tokens_per_second_per_gpu: float
    """Median over the measured steps; of a dry run, what its compute and the computed rest come to."""
    interval: tuple[float, float]
    """95 % bootstrap interval of that median; of a dry run, what its model states."""
    step_seconds: float
    measured_steps: int
    warmup_steps: int
    stopped_early: bool
    time_to_first_step: float
    """Seconds from launch to the end of step 1."""
    losses: tuple[float, ...]
    memory: tuple[RankMemory, ...]
    alloc_retries: int
    memory_kind: str = "cuda"
    """``cuda`` (allocator) or ``rss`` (resident set size of a CPU process)."""
    origin: Origin = Origin.MEASURED

    @property
    def peak_active_bytes(self) -> int:
        """Of the worst rank."""
        return max((m.active_bytes for m in self.memory), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Of the worst rank."""
        return max((m.reserved_bytes for m in self.memory), default=0)

    @property
    def peak_device_bytes(self) -> int:
        """Of the worst rank."""
        return max((m.device_bytes for m in self.memory), default=0)


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """How one probe ended. ``details`` holds what the status needs: for ``oom`` the phase, the rank and
    the bytes asked for; for ``unsupported`` and ``compile_failure`` the exception type and phase. A local probe
    also has ``launcher`` (and why it was not the one asked for), ``phases`` (where the wall time went), ``trend``
    (``probe.measurement.trend``), and ``cannot_win`` where it was given up for ``ProbeSpec.beat``."""

    status: ProbeStatus
    message: str
    seconds: float
    """Wall clock from launch to end, all processes gone."""
    measurement: Measurement | None = None
    details: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    attempts: int = 1

    @property
    def origin(self) -> Origin:
        """Whether every rank ran, or was to run, or single ranks did; a dry run that failed is one by its details."""
        if self.measurement is not None:
            return self.measurement.origin
        return Origin.DRY_RUN if DRY_RUN_DETAILS & self.details.keys() else Origin.MEASURED

    def gpu_seconds(self, world_size: int) -> float:
        """GPU time: every GPU of the job for as long as it ran, or what a dry run took of those it ran on.

        A dry run that did not record it is counted as one GPU for as long as it ran.
        """
        gpus = 1 if self.origin is Origin.DRY_RUN else world_size
        return float(self.details.get("gpu_seconds", self.seconds * gpus))


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """What a running probe shows."""

    phase: str
    """starting, compiling, step, stopping."""
    step: int
    steps: int
    tokens_per_second: float | None
    seconds: float
