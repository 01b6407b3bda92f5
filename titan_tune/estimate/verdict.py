"""How sure the formula is, and whether the configuration runs on the card."""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes
from titan_tune.estimate.schedule import ZERO_BUBBLE_SCHEDULES


class Residual(NamedTuple):
    """How far the formula was off on one path."""

    path: str
    rows: int
    worst_percent: float
    """Largest |error| of peak active memory."""


MEASURED_RESIDUALS: tuple[Residual, ...] = (
    Residual("one GPU", 37, 0.02),
    Residual("DDP", 1, 0.01),
    Residual("FSDP", 12, 0.92),
    Residual("TP", 4, 0.02),
    Residual("PP", 4, 0.52),
)
"""Of the H200 runs (torch 2.11, torchtitan 0.2.2); benchmarks/memory_accuracy.py recomputes them."""

MEASURED_MARGIN = 0.005
"""Half-width where rows agree to 0.02 %: allocator rounding and versions of torch."""
FEW_ROWS_MARGIN = 0.01
"""One or two rows, or none but whole-step traces that agree to 0.1 % (reports/formula_against_trace.md)."""
EAGER_BLOCK_MARGIN = 0.03
"""Blocks whose own backward is the peak, eager or without AC: traces only, -1 to +6 %."""
ROWWISE_FULL_MARGIN = 0.02
"""The one FSDP row above 0.02 %: rowwise float8 with full AC, 0.9 % low."""

ZERO_BUBBLE_MARGIN = (0.15, 0.5)
"""Split backwards: two traces needed far more than this, for a reason not found."""

Margin = tuple[float, float]


def relative_margins(settings: Settings, shapes: Shapes, peak: str) -> Margin:
    """``(below, above)`` as fractions of the active peak: measured residuals, wider for each part
    that no row covers. ``peak`` is the name of the peak phase."""
    dims = settings.dims
    compiled_recompute = shapes.compile_block and shapes.recompute in (Recompute.OP, Recompute.FULL)
    below = above = MEASURED_MARGIN
    for applies, low, high in (
        (shapes.path is ParamPath.AUTOCAST and dims.dp_replicate > 1, *_both(FEW_ROWS_MARGIN)),
        (dims.pp > 1, *_both(FEW_ROWS_MARGIN)),
        (dims.cp > 1, *_both(2 * FEW_ROWS_MARGIN)),
        (peak.endswith("block_backward") and not compiled_recompute, *_both(EAGER_BLOCK_MARGIN)),
        (shapes.path is ParamPath.FSDP and dims.dp_replicate > 1, *_both(FEW_ROWS_MARGIN)),
        (shapes.path is ParamPath.FSDP and dims.tp > 1, *_both(FEW_ROWS_MARGIN)),
        (shapes.rowwise and shapes.recompute is Recompute.FULL, *_both(ROWWISE_FULL_MARGIN)),
        (dims.pp > 1 and (dims.tp > 1 or shapes.path is ParamPath.FSDP), *_both(0.02)),
        (dims.pp > 1 and settings.pipeline.schedule.lower() in ZERO_BUBBLE_SCHEDULES, *ZERO_BUBBLE_MARGIN),
        (shapes.recompute is Recompute.BUDGET, *_both(2 * FEW_ROWS_MARGIN)),
        (shapes.math_attention, 0.02, 0.06),
        (shapes.math_attention and shapes.recompute in (Recompute.NONE, Recompute.EVERY), *_both(0.05)),
        (settings.mxfp8, *_both(0.06)),
        (shapes.offload, *_both(0.05)),
        (shapes.accumulates, *_both(FEW_ROWS_MARGIN)),
        (shapes.reshard_output or (shapes.keep_gathered and dims.pp == 1), *_both(FEW_ROWS_MARGIN)),
        (settings.model.attention != "sdpa", *_both(0.03)),
    ):
        if applies:
            below += low
            above += high
    return below, above


def _both(margin: float) -> Margin:
    return margin, margin


def verdict_of(active_upper: float, reserved: float, outside: float, capacity: float) -> Verdict:
    """Fits when reserved fits as well; pressure when only active does (all bytes)."""
    if active_upper + outside > capacity:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if reserved + outside <= capacity else Verdict.PRESSURE
