"""The collectives of a configuration in one optimizer step, from its shapes alone.

What a dry run counts, the formula lists here in the same terms: torchtitan 0.2.2's FSDP (one group a
block, one for the embedding, one for final norm and output), HSDP, DDP buckets, tensor parallelism with
sequence parallelism, context parallelism by all-gather, pipeline sends and the tokens of routed experts.
Collectives of a few bytes (loss, gradient norm) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from titan_tune.domain.settings import Settings
from titan_tune.estimate.collectives import Cause, CollectiveRecord, Op
from titan_tune.estimate.parameters import FP32_BYTES, Recompute, Shapes

DDP_BUCKET_BYTES = 100e6
"""``bucket_cap_mb`` that torchtitan passes to ``replicate``."""
SCALE_REDUCTIONS = (18, 8)
"""All-reduces of one number that find the scales of a block's float8 tensors, which TP splits: forward and backward,
and those that full AC adds. A dry run of 405B counted 11 and 15; how many of the 15 are recomputation is a guess."""
TP_COLLECTIVES = 4
"""A block's gathers, and as many scatters: one of each around attention and feed-forward, forward and backward."""


class Work(NamedTuple):
    """What one pipeline rank has: blocks, output head or not, chunks."""

    layers: float
    has_output: bool
    chunks: int = 1


class ParameterGroups(NamedTuple):
    """What a rank's parameters and gradients are moved in: all that FSDP, HSDP and DDP depend on."""

    shards: int
    replicate: int
    tp: int
    blocks: int
    tables: int
    """Groups of the size of the embedding: itself, and final norm with output."""
    block_params: float
    """On one TP rank when gathered, averaged over the blocks."""
    table_params: float
    compute_bytes: int
    """Of a gathered parameter, the blocks' in float8 apart."""
    block_bytes: int
    """Of a gathered parameter of a block."""
    gathers: int
    """Of a block for one forward and backward."""
    stored_bytes: float
    """Of all parameters that the rank stores."""
    accumulation: int


def records(settings: Settings, s: Shapes, work: Work, passes: int) -> list[CollectiveRecord]:
    """Collectives of one rank; ``passes`` is how many forwards each of its blocks runs in a step."""
    groups = parameter_groups(s, work, settings.gradient_accumulation_steps)
    of_parameters = parameter_records(groups) if groups else []
    return of_parameters + activation_records(s, work, passes, etp=settings.dims.etp)


def parameter_groups(s: Shapes, work: Work, accumulation: int) -> ParameterGroups | None:
    """``None`` where no other rank has the same parameters."""
    if s.shards == 1 and s.replicate == 1:
        return None
    return ParameterGroups(
        s.shards,
        s.replicate,
        s.tp,
        round(work.layers),
        2 if s.pp == 1 else 1,
        s.gathered_blocks(0, s.layers) / s.layers,
        s.gathered_table_params,
        s.compute_bytes,
        1 if s.float8_all_gather else s.compute_bytes,
        1 if s.keep_gathered else 2,
        s.param_bytes * s.local_params if s.shards == 1 else 0.0,
        accumulation,
    )


def parameter_records(groups: ParameterGroups) -> list[CollectiveRecord]:
    """What moves parameters and gradients."""
    found: list[CollectiveRecord] = []
    if groups.shards > 1:
        found += _fsdp(groups)
    if groups.replicate > 1:
        found += _replicas(groups)
    return found


def activation_records(s: Shapes, work: Work, passes: int, *, etp: int) -> list[CollectiveRecord]:
    """What moves activations and their gradients; ``etp`` is the degree of expert tensor parallelism."""
    found: list[CollectiveRecord] = []
    if s.tp > 1:
        found += _tensor_parallel(s, work, passes)
        if s.float8 and not s.rowwise:
            found.append(_scales(s, work, passes))
    if s.cp > 1:
        found += _context_parallel(s, work, passes)
    if s.moe is not None and s.moe.own_group:
        found.append(_experts(s, work, passes, etp))
    if s.pp > 1:
        found += _pipeline(s, work, passes)
    return found


def _fsdp(g: ParameterGroups) -> Iterator[CollectiveRecord]:
    """Gathers in forward and, where they were given back, in backward; fp32 scatters of the gradients."""
    blocks, tables = g.blocks * g.accumulation, g.tables * g.accumulation
    gathered = g.block_bytes * g.block_params
    shapes = (
        (Op.ALL_GATHER, "forward", blocks, gathered),
        (Op.ALL_GATHER, "backward", blocks * (g.gathers - 1), gathered),
        (Op.REDUCE_SCATTER, "backward", blocks, FP32_BYTES * g.block_params),
        (Op.ALL_GATHER, "forward", tables, g.compute_bytes * g.table_params),
        (Op.REDUCE_SCATTER, "backward", tables, FP32_BYTES * g.table_params),
    )
    for op, phase, count, size in shapes:
        if count:
            yield CollectiveRecord(op, count, size, g.shards, g.tp, 0, phase, Cause.FSDP)


def _replicas(g: ParameterGroups) -> Iterator[CollectiveRecord]:
    """HSDP reduces each group's gradient shard in fp32, DDP its buckets in the parameters' type."""
    if g.shards > 1:
        sizes = [(g.blocks, FP32_BYTES * g.block_params / g.shards)]
        sizes.append((g.tables, FP32_BYTES * g.table_params / g.shards))
        cause = Cause.HSDP
    else:
        buckets = math.ceil(g.stored_bytes / DDP_BUCKET_BYTES)
        sizes, cause = [(buckets, g.stored_bytes / buckets)], Cause.DDP
    for count, size in sizes:
        yield CollectiveRecord(
            Op.ALL_REDUCE, count * g.accumulation, size, g.replicate, g.tp * g.shards, 0, "backward", cause
        )


def _recomputed_tp(s: Shapes) -> tuple[float, float]:
    """Gathers and scatters of a block that backward runs again: op AC keeps scatters, and a compiled recomputation
    leaves out the last one, which nothing in the block reads."""
    if s.recompute is Recompute.NONE:
        return 0.0, 0.0
    if s.recompute is Recompute.FULL or s.recompute is Recompute.EVERY:
        share = (s.layers // s.every) / s.layers if s.recompute is Recompute.EVERY else 1.0
        return 2 * share, (1 if s.compile_block else 2) * share
    return 2.0, 0.0


def _tensor_parallel(s: Shapes, work: Work, passes: int) -> Iterator[CollectiveRecord]:
    size = s.compute_bytes * s.tokens * s.dim
    # after the embedding, before the output, and their backwards
    ends = 2 if s.pp == 1 else int(work.has_output)
    for op, again in zip((Op.ALL_GATHER, Op.REDUCE_SCATTER), _recomputed_tp(s), strict=True):
        count = round(passes * (work.layers * (TP_COLLECTIVES + again) + ends))
        yield CollectiveRecord(op, count, size, s.tp, 1, 0, "", Cause.TP)


def _scales(s: Shapes, work: Work, passes: int) -> CollectiveRecord:
    """What tensorwise float8 adds: the largest number of a tensor that is split over the ranks."""
    always, recomputed = SCALE_REDUCTIONS
    share = 0.0
    if s.recompute is Recompute.FULL:
        share = 1.0
    elif s.recompute is Recompute.EVERY:
        share = (s.layers // s.every) / s.layers
    count = round(passes * work.layers * (always + share * recomputed))
    return CollectiveRecord(Op.ALL_REDUCE, count, 2 * FP32_BYTES, s.tp, 1, 0, "", Cause.TP)


def context_parallel_width(s: Shapes) -> int:
    """Key and value elements of a token: torchtitan repeats grouped heads before attention."""
    return s.attn_dim + s.attention.output


def _context_parallel(s: Shapes, work: Work, passes: int) -> Iterator[CollectiveRecord]:
    """Keys and values forward, again in backward, and their gradients back in a ring of the same bytes."""
    size = s.compute_bytes * s.tokens * s.cp * context_parallel_width(s) / s.tp
    again = s.recompute is Recompute.FULL or s.recompute is Recompute.BUDGET
    count = round(passes * work.layers)
    yield CollectiveRecord(Op.ALL_GATHER, count * (3 if again else 2), size, s.cp, s.tp, 0, "", Cause.CP)
    yield CollectiveRecord(Op.ALL_TO_ALL, count, size, s.cp, s.tp, 0, "backward", Cause.CP)


def _experts(s: Shapes, work: Work, passes: int, etp: int) -> CollectiveRecord:
    """Tokens to the experts and back, forward and backward."""
    assert s.moe is not None
    exchanges = 4 + (2 if s.recompute is Recompute.FULL else 0)
    layers = work.layers * s.num_moe_layers(0, s.layers) / s.layers
    size = s.compute_bytes * s.moe.routed * s.dim
    stride = 1 if etp == 1 else s.tp
    count = round(passes * layers * exchanges)
    return CollectiveRecord(Op.ALL_TO_ALL, count, size, s.moe.expert_parallel, stride, 0, "", Cause.EP)


def _pipeline(s: Shapes, work: Work, passes: int) -> Iterator[CollectiveRecord]:
    """Over each boundary of a chunk a hidden state goes one way and its gradient the other."""
    distance = s.replicate * s.shards * s.tp
    is_end = work.has_output or s.pp == 2
    count = passes * (2 * work.chunks - (1 if is_end else 0))
    for op in (Op.SEND, Op.RECV):
        yield CollectiveRecord(op, count, s.residual_stream_bytes, s.pp, distance, 0, "", Cause.PP)
