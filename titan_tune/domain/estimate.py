"""What an estimate says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether the configuration runs on the card."""

    FITS = "fits"
    PRESSURE = "pressure"
    """Active memory fits, reserved would not: it runs with allocation retries."""
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True)
class Phase:
    """One moment of the step: an itemised sum, in bytes."""

    name: str
    items: Mapping[str, float]

    @property
    def total_bytes(self) -> float:
        """Sum of the items."""
        return sum(self.items.values())


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak of one pipeline stage (stage 0 where there is no pipeline)."""

    stage: int
    peak: Phase
    phases: tuple[Phase, ...]
    active_bytes: float
    reserved_bytes: float


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak memory of the worst rank, bytes, with an interval from measured residuals."""

    method: str
    stages: Sequence[StageMemory]
    worst_stage: int
    active_bytes: float
    active_interval: tuple[float, float]
    reserved_bytes: float
    device_bytes: float
    """Reserved plus what lies outside the allocator (context, cuBLAS, NCCL)."""
    outside_bytes: float
    components: Mapping[str, float]
    """The peak phase by component: parameters, gradients, optimizer, activations, attention_scores,
    logits_loss, gathered_parameters, other. Sums to ``active_bytes``."""
    capacity_bytes: float
    verdict: Verdict
    assumptions: tuple[str, ...] = ()
    """What the figures take for granted, one sentence each."""

    @property
    def peak(self) -> Phase:
        """Peak phase of the worst stage."""
        return next(s for s in self.stages if s.stage == self.worst_stage).peak


@dataclass(frozen=True, slots=True)
class StepTimeEstimate:
    """Predicted speed of one configuration."""

    seconds: float
    tokens_per_second_per_gpu: float
    interval: tuple[float, float]
    """Of tokens per second per GPU."""
    components: Mapping[str, float]
    """Seconds by cause: matmul, attention, elementwise, loss, optimizer, communication, …"""
