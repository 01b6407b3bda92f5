"""What a machine was measured to do, in the terms of the step-time model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One collective between the GPUs of a node."""

    op: str
    """As in ``titan_tune.estimate.collectives.Op``."""
    gb_per_s: float
    """Bus bandwidth of large messages, GB/s a rank and direction."""
    latency_seconds: float
    """Of one step from a rank to its neighbour."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Rates of large, unhurried kernels: a training step reaches a share of them. 0 where not measured."""

    matmul_tflops: float
    """bf16."""
    copy_gb_per_s: float
    """Read plus written."""
    attention_tflops: float = 0.0
    """Causal, forward and backward, counted as the step-time model does."""
    float32_tflops: float = 0.0
    float8_tensorwise_tflops: float = 0.0
    float8_rowwise_tflops: float = 0.0
    links: tuple[LinkRate, ...] = ()
    source: str = ""
