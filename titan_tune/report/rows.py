"""The rows of a report: configurations, probes, rejections, axes. Units as in :mod:`titan_tune.report.data`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_tune.domain.probe import Origin
from titan_tune.report.answer import Choices, Memory


def label_of(choices: Choices) -> str:
    """``axis=label`` pairs in one line; ``the job as it is`` for a space without axes."""
    return ", ".join(f"{axis}={label}" for axis, label in choices) or "the job as it is"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration with a throughput, all its runs taken together."""

    config_id: str
    choices: Choices
    """Without the axes that are the same in every probe."""
    tokens_per_second: float
    interval: tuple[float, float]
    runs: int
    spread: float
    """(Largest - smallest) / median over its runs; 0 for one run."""
    final: bool
    is_baseline: bool
    is_best: bool
    changes_numerics: bool
    gain: float | None
    origin: Origin
    memory: Memory

    @property
    def marks(self) -> tuple[str, ...]:
        """What sets it apart, in words."""
        marks = (
            ("best", self.is_best),
            ("dry run", self.origin is Origin.DRY_RUN),
            ("job as it was", self.is_baseline),
            ("finals", self.final),
            ("changes numerics", self.changes_numerics),
        )
        return tuple(name for name, holds in marks if holds)

    @property
    def label(self) -> str:
        """The choices in one line."""
        return label_of(self.choices)


@dataclass(frozen=True, slots=True)
class Step:
    """One probe on the way: GPU-minutes used when it ended, and its throughput."""

    number: int
    role: str
    label: str
    is_baseline: bool
    gpu_minutes: float
    origin: Origin
    tokens_per_second: float | None
    status: str
    best_so_far: float | None
    """Largest throughput of the exploring probes up to here; the finals measure again and do not count."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One probe. ``None`` where a probe that failed has no such figure."""

    number: int
    role: str
    status: str
    origin: Origin
    seconds: float
    choices: Choices
    tokens_per_second: float | None
    final_loss: float | None
    alloc_retries: int | None
    time_to_first_step: float | None
    folder: str
    message: str
    details: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def label(self) -> str:
        """The choices in one line."""
        return label_of(self.choices)

    @property
    def ended(self) -> str:
        """The status, and that it is a dry run's."""
        return f"{self.status}, {self.origin}" if self.origin is Origin.DRY_RUN else self.status


@dataclass(frozen=True, slots=True)
class Rejection:
    """Combinations that one rule kept away from any GPU."""

    rule: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One searched dimension."""

    name: str
    labels: tuple[str, ...]
    changes_numerics: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """What became of every combination."""

    total: int
    duplicates: int
    rejected: tuple[Rejection, ...]
    candidates: int
    tried: int
    measured: int
    out_of_memory: int
    """Configurations that the formula let through and that ran out of memory all the same."""

    @property
    def untried(self) -> int:
        """Candidates that no probe ran."""
        return max(0, self.candidates - self.tried)
