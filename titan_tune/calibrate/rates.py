"""A calibration condensed to the rates that the step-time model reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_tune.calibrate.result import Calibration, CollectiveTime, Matmul, MatmulKind
from titan_tune.domain.calibration import LinkRate, MeasuredRates
from titan_tune.estimate.collectives import NCCL_LAUNCH_SECONDS, Op, bus_bytes, ring_steps
from titan_tune.estimate.step_time import ATTENTION_BACKWARD

BACKWARD_AND_FORWARD = 1 + ATTENTION_BACKWARD


def rates_of(calibration: Calibration) -> MeasuredRates:
    """Rates of the largest shapes measured; 0 for what was not."""
    return MeasuredRates(
        matmul_tflops=_matmul_tflops(calibration.matmuls, "bfloat16"),
        float32_tflops=_matmul_tflops(calibration.matmuls, "float32"),
        float8_tensorwise_tflops=_matmul_tflops(calibration.matmuls, "float8_tensorwise"),
        float8_rowwise_tflops=_matmul_tflops(calibration.matmuls, "float8_rowwise"),
        attention_tflops=_attention_tflops(calibration),
        copy_gb_per_s=max((2 * copy.bytes / copy.seconds / 1e9 for copy in calibration.copies), default=0.0),
        links=tuple(_links(calibration.collectives)),
        source=f"calibrated on this machine, {calibration.created[:10]}",
    )


def _matmul_tflops(matmuls: Iterable[Matmul], kind: MatmulKind) -> float:
    """Work over time of all shapes with the most tokens."""
    same = [matmul for matmul in matmuls if matmul.kind == kind]
    most = max((matmul.tokens for matmul in same), default=0)
    largest = [matmul for matmul in same if matmul.tokens == most]
    seconds = sum(matmul.seconds for matmul in largest)
    return sum(matmul.flops for matmul in largest) / seconds / 1e12 if seconds else 0.0


def _attention_tflops(calibration: Calibration) -> float:
    """Work over time; the causal half of two products forward, :data:`ATTENTION_BACKWARD` times that backward."""
    found = calibration.attention
    seconds = sum(item.forward_seconds + item.backward_seconds for item in found)
    forward = sum(2.0 * item.batch * item.heads * item.head_dim * item.sequence**2 for item in found)
    return forward * BACKWARD_AND_FORWARD / seconds / 1e12 if seconds else 0.0


def _links(times: Sequence[CollectiveTime]) -> Iterable[LinkRate]:
    for op in Op:
        same = [time for time in times if time.op is op]
        if same:
            yield _link(op, same)


def _link(op: Op, times: Sequence[CollectiveTime]) -> LinkRate:
    """Line through time over bytes, errors counted relative to the time: small messages say the latency."""
    group_size = times[0].group_size
    moved = [bus_bytes(op, time.bytes, group_size) for time in times]
    weights = [1 / time.seconds**2 for time in times]
    total = sum(weights)
    mean_moved = sum(w * x for w, x in zip(weights, moved, strict=True)) / total
    mean_seconds = sum(w * t.seconds for w, t in zip(weights, times, strict=True)) / total
    spread = sum(w * (x - mean_moved) ** 2 for w, x in zip(weights, moved, strict=True))
    together = sum(
        w * (x - mean_moved) * (t.seconds - mean_seconds)
        for w, x, t in zip(weights, moved, times, strict=True)
    )
    slope = together / spread if spread > 0 else 0.0
    if slope <= 0:  # one size, or noise: all of the largest message's time is bandwidth
        largest = max(times, key=lambda time: time.bytes)
        return LinkRate(op, bus_bytes(op, largest.bytes, group_size) / largest.seconds / 1e9, 0.0)
    start = mean_seconds - slope * mean_moved - NCCL_LAUNCH_SECONDS
    return LinkRate(op, 1e-9 / slope, max(0.0, start / ring_steps(op, group_size)))
