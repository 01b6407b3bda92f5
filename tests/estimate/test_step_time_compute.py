"""Compute of one step: what backward runs again, and what is cast to float8."""

from __future__ import annotations

from dataclasses import replace

import pytest
from h200 import rows

from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    Float8,
    ParallelDims,
    Settings,
)
from titan_tune.estimate import estimate_step_time
from titan_tune.estimate.step_time import CONSTANTS

NONE = ActivationCheckpointing(AcMode.NONE)
OP = ActivationCheckpointing(AcMode.SELECTIVE, every=0)
EVERY_SECOND = ActivationCheckpointing(AcMode.SELECTIVE, every=2)
FULL = ActivationCheckpointing(AcMode.FULL)
BUDGET = ActivationCheckpointing(AcMode.MEMORY_BUDGET, memory_budget=0.75)
EAGER = Compilation()
# 1B, one GPU, 4 x 4096 tokens; matmuls at the peak, whatever their shape
JOB = replace(
    next(row.settings for row in rows() if row.id == "1B-b4-s4096-op-c-bf16"), dims=ParallelDims(), ac=NONE
)
IDEAL = CONSTANTS._replace(matmul_efficiency=1.0, tile_elements=0.0, reduction=0.0)
TOKENS, LAYERS = 4 * 4096, 16
WQ, WK, WO, W1 = 2048 * 2048, 2048 * 512, 2048 * 2048, 2048 * 8192
BLOCK = WQ + 2 * WK + WO + 3 * W1
PEAK = JOB.cluster.gpu.bf16_tflops * 1e12


def again(job: Settings) -> float:
    """Parameters of each block that backward multiplies with once more."""
    base = estimate_step_time(replace(job, ac=NONE), IDEAL).components["matmul"]
    added = estimate_step_time(job, IDEAL).components["matmul"] - base
    return added * PEAK / (2 * TOKENS * LAYERS)


@pytest.mark.parametrize(
    ("ac", "compiled", "eager"),
    [
        (NONE, 0, 0),
        (OP, WK + WO + W1, WK + WO + W1),
        (FULL, BLOCK - W1, BLOCK),
        (EVERY_SECOND, (BLOCK - W1) / 2, BLOCK / 2),
        (BUDGET, (BLOCK - W1) / 4, BLOCK / 4),
    ],
)
def test_products_that_backward_runs_again(
    ac: ActivationCheckpointing, compiled: float, eager: float
) -> None:
    assert again(replace(JOB, ac=ac)) == pytest.approx(compiled)
    assert again(replace(JOB, ac=ac, compile=EAGER)) == pytest.approx(eager)


def test_forward_and_backward_without_recomputation() -> None:
    seconds = estimate_step_time(JOB, IDEAL).components["matmul"]
    assert seconds == pytest.approx(6 * TOKENS * (LAYERS * BLOCK + 2048 * 128256) / PEAK)


def test_eager_recomputation_casts_inputs_and_weights_again() -> None:
    """Of six casts of a linear two are forward's: its input and its weight."""
    k = CONSTANTS._replace(float8_cast_bytes=1.0, float8_weight_casts=0.0, eager_float8_casts=1.0)
    kept = replace(JOB, compile=EAGER, float8=Float8())
    inputs, gradients = 2 * 2048 + 2048 + 8192, 2 * 2048 + 2048 + 2 * 512 + 2 * 8192
    once = estimate_step_time(kept, k).components["float8_casts"]
    full = estimate_step_time(replace(kept, ac=FULL), k).components["float8_casts"]
    assert full / once == pytest.approx(1 + inputs / 2 / (inputs + gradients))
    only_weights = k._replace(float8_cast_bytes=0.0, float8_weight_casts=1.0)
    once = estimate_step_time(kept, only_weights).components["float8_casts"]
    full = estimate_step_time(replace(kept, ac=FULL), only_weights).components["float8_casts"]
    assert full / once == pytest.approx(1.5)


def test_compiled_recomputation_casts_nothing_more() -> None:
    kept = replace(JOB, float8=Float8())
    full = replace(kept, ac=FULL)
    casts = estimate_step_time(kept).components["float8_casts"]
    assert estimate_step_time(full).components["float8_casts"] == casts > 0
