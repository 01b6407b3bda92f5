"""How sure the formula is, and whether the configuration runs on the card."""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import ParallelDims, Settings
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes
from titan_tune.estimate.reserved import uses_cuda_graphs
from titan_tune.estimate.schedule import ZERO_BUBBLE_SCHEDULES


class Residual(NamedTuple):
    """How far the formula was off on one path."""

    path: str
    rows: int
    worst_percent: float
    """Largest |error| of peak active memory, rounded up."""


MEASURED_RESIDUALS: tuple[Residual, ...] = (
    Residual("one GPU", 41, 0.02),
    Residual("one GPU, MoE", 1, 0.04),
    Residual("DDP", 2, 0.01),
    Residual("FSDP", 34, 0.82),
    Residual("FSDP, MoE", 9, 1.15),
    Residual("HSDP", 4, 0.44),
    Residual("TP", 8, 0.01),
    Residual("FSDP + TP", 8, 0.01),
    Residual("CP", 7, 0.01),
    Residual("PP", 12, 1.06),
    Residual("PP + FSDP", 5, 0.07),
    Residual("PP + TP", 2, 0.01),
    Residual("PP + CP", 2, 0.02),
    Residual("PP, zero bubble", 6, 0.67),
)
"""Of the H200 runs and dry runs (torch 2.11, torchtitan 0.2.2), a job that ran both ways once; a test recomputes
them. Rows of a pipeline count its ranks."""

MEASURED_MARGIN = 0.005
"""Half-width where rows agree to 0.02 %: allocator rounding and versions of torch."""
FEW_ROWS_MARGIN = 0.01
"""One or two rows, or none but whole-step traces that agree to 0.1 % (reports/formula_against_trace.md)."""
EAGER_BLOCK_MARGIN = 0.03
"""Blocks whose own backward is the peak, eager or without AC: rows of mixtures of experts up to 1.2 % above the
formula; dense blocks agree with traces to 0.1 %."""
FLEX_POLICY_MARGIN = 0.04
"""Eager flex attention with selective op AC: one row, and a trace that does not know what its compiled
kernel hands to the policy."""
ROUTING_MARGIN = 0.1
"""More above with expert parallelism: routing is taken as even, a router need not be. Not measured."""
ROWWISE_FULL_MARGIN = 0.02
"""Rowwise float8 with full AC under FSDP: two rows, 0.8 % off, one each way."""

FLOAT8_BLOCK_MARGINS = (0.02, 0.04)
FLOAT8_ROWWISE_BLOCK_MARGINS = (0.01, 0.13)
"""``(below, above)`` of compiled float8 blocks whose own backward is the peak: one H200 rank is 1.05 % below the
formula; torch 2.13 holds up to 4 % more where scales are of whole tensors, torch 2.11 up to 12 % more where they are
not (traces)."""

SPLIT_BLOCK_MARGIN = 0.07
"""More above under DDP: torch.compile splits a block without AC at DDP's buckets, and what passes the split is saved.
One H200 job (bf16, float8) has 7.7 % more; the same without float8 has 4.3 % more on one of its two ranks."""
BUCKET_BYTES = 100 << 20
"""``bucket_cap_mb`` of torchtitan 0.2.2."""
COMPILED_RING_MARGIN = 0.01
"""More above with CP, compile and no AC: two H200 jobs have 1.5 and 1.9 % more, one of them on one rank only."""
GRAPHED_GRADIENTS_MARGIN = 0.16
"""More below where CUDA graphs meet gradient accumulation: gradients that a graph's own pool holds are reserved, but
not counted as active. Seven H200 rows have 11 to 16 % less, and rows without accumulation agree to 0.1 %."""
UNTRACED_MARGIN = 0.05
"""What neither a row nor a trace covers."""
PIPELINE_MARGIN = 0.0165
"""More with a pipeline: with ``MEASURED_MARGIN`` twice the largest residual of its 27 ranks, which is 1.05 %; traced
ranks are at most 0.72 % off. Neither FSDP nor TP nor CP beside it, nor a schedule, stands out."""

Margin = tuple[float, float]


def relative_margins(settings: Settings, shapes: Shapes, peak: str) -> Margin:
    """``(below, above)`` as fractions of the active peak: measured residuals, wider for each part
    that no row covers. ``peak`` is the name of the peak phase."""
    dims = settings.dims
    mode, is_pipeline = shapes.recompute, dims.pp > 1
    compiled_recompute = shapes.compile_block and mode in (Recompute.OP, Recompute.FULL)
    below = above = MEASURED_MARGIN + sum(
        margin
        for applies, margin in (
            (shapes.path is ParamPath.AUTOCAST and dims.dp_replicate > 1, FEW_ROWS_MARGIN),
            (is_pipeline, PIPELINE_MARGIN),
            # rows and traces of two models, all with two pipeline ranks
            (is_pipeline and settings.pipeline.schedule.lower() in ZERO_BUBBLE_SCHEDULES, FEW_ROWS_MARGIN),
            (dims.cp > 1, FEW_ROWS_MARGIN),
            (not compiled_recompute and peak.endswith("block_backward"), EAGER_BLOCK_MARGIN),
            (shapes.rowwise and mode is Recompute.FULL, ROWWISE_FULL_MARGIN),
            (mode is Recompute.BUDGET, 2 * FEW_ROWS_MARGIN),
            (shapes.math_attention, FEW_ROWS_MARGIN),
            (shapes.math_attention and mode in (Recompute.NONE, Recompute.EVERY), UNTRACED_MARGIN),
            (settings.mxfp8 or settings.grouped_float8 or settings.grouped_mxfp8, UNTRACED_MARGIN),
            (shapes.offload, UNTRACED_MARGIN),
            (shapes.reshard_output or (shapes.keep_gathered and not is_pipeline), FEW_ROWS_MARGIN),
        )
        if applies
    )
    if shapes.float8 and shapes.compile_block and peak.endswith("block_backward"):
        more = FLOAT8_ROWWISE_BLOCK_MARGINS if shapes.rowwise else FLOAT8_BLOCK_MARGINS
        below, above = below + more[0], above + more[1]
    if shapes.compile_block and mode is Recompute.NONE:
        if shapes.path is ParamPath.AUTOCAST and dims.dp_replicate > 1:
            is_split = shapes.param_bytes * shapes.gathered_params(False) > BUCKET_BYTES
            above += SPLIT_BLOCK_MARGIN * is_split
        if dims.cp > 1:
            above += COMPILED_RING_MARGIN
    if uses_cuda_graphs(settings) and shapes.accumulates:
        below += GRAPHED_GRADIENTS_MARGIN
    if settings.model.attention != "sdpa":
        below, above = below + _masked_margin(shapes), above + _masked_margin(shapes)
    if shapes.moe is not None:
        experts = _experts_margin(shapes, dims)
        below, above = below + experts, above + experts + (ROUTING_MARGIN if dims.ep > 1 else 0.0)
    return below, above


def _masked_margin(shapes: Shapes) -> float:
    """Flex and varlen attention: rows of flex with mixtures of experts, traces of the others."""
    if not shapes.flex_attention:
        return EAGER_BLOCK_MARGIN
    hands_over = shapes.recompute is Recompute.OP and not shapes.compile_block
    return FLEX_POLICY_MARGIN if hands_over else FEW_ROWS_MARGIN


def _experts_margin(shapes: Shapes, dims: ParallelDims) -> float:
    """Rows have FSDP, with and without expert parallelism, and one GPU; traces the other layouts."""
    margin = 0.0
    if shapes.path is not ParamPath.FSDP or dims.tp > 1 or dims.cp > 1 or dims.pp > 1:
        margin += 2 * FEW_ROWS_MARGIN
    if dims.ep > 1:
        margin += FEW_ROWS_MARGIN
    if shapes.float8 or shapes.recompute is Recompute.BUDGET:
        margin += UNTRACED_MARGIN
    return margin


def verdict_of(active: Margin, reserved: float, outside: float, capacity: float) -> Verdict:
    """``active`` is the interval of peak active memory; all bytes.

    Too much only when even the lower end is: a search may reject no configuration that would have
    run. Fits when the upper end and reserved do; pressure between the two.
    """
    lower, upper = active
    if lower + outside > capacity:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if max(upper, reserved) + outside <= capacity else Verdict.PRESSURE
