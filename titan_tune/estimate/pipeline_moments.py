"""What a pipeline rank holds at each moment of its schedule, and what the backward of a stage adds to it."""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.estimate.activations import saved_block_bytes
from titan_tune.estimate.backward import experts_backward, working_set
from titan_tune.estimate.parameters import Recompute, Shapes
from titan_tune.estimate.phases import embedding_scratch_bytes, loss_bytes
from titan_tune.estimate.reserved import WEIGHT_HALF
from titan_tune.estimate.schedule import BACKWARD, WEIGHT, Moment
from titan_tune.estimate.stages import Stage, local_logits, saved_by_loss


class Costs(NamedTuple):
    """Sizes that every backward of a job shares, bytes."""

    working_set: float
    scores_backward: float
    loss: float
    """Logits and loss at their largest, logits held by the schedule included."""
    logits: float
    saved_by_loss: float
    hidden: float
    norm_output: float
    table: float
    """Output weight (or embedding) gradient in the compute dtype."""
    embedding_full: float
    """What TP's embedding gradient holds beyond its shard: full-vocabulary storage, full-width input."""
    embedding_scratch: float


def costs_of(s: Shapes) -> Costs:
    """The :class:`Costs` of a job."""
    working, scores = working_set(s)
    if s.moe is not None:  # what a block's backward holds beyond what it saved
        mode = Recompute.NONE if s.recompute is Recompute.EVERY else s.recompute
        peak = max(m.contents + m.gradients for m in experts_backward(s, mode))
        working = max(working, peak - saved_block_bytes(s, mode, True))
    return Costs(
        working_set=working,
        scores_backward=scores,
        loss=loss_bytes(s, logits_held=True),
        logits=s.compute_bytes * local_logits(s),
        saved_by_loss=saved_by_loss(s),
        hidden=s.residual_stream_bytes,
        norm_output=s.compute_bytes * s.tokens * s.dim,
        table=s.compute_bytes * s.embedding_shard_params,
        embedding_full=s.compute_bytes * s.dim * (s.vocab + s.tokens) * (1 - 1 / s.tp),
        embedding_scratch=embedding_scratch_bytes(s),
    )


Row = tuple[float, float, float, float, float, float, float, float, float]
"""What one moment of a backward adds to what its rank always holds, bytes, in the order of ``ROW_ITEMS``."""
ROW_ITEMS = (
    "activations",
    "attention_scores",
    "logits_loss",
    "unsharded_gradients",
    "new_gradients",
    "residual_gradient",
    "working_set",
    "attention_scores_backward",
    "embedding_scratch",
)
NEW_GRADIENTS = ROW_ITEMS.index("new_gradients")
LOGITS = ROW_ITEMS.index("logits_loss")


class RankGradients(NamedTuple):
    """What a rank does with its gradients between microbatches."""

    is_sharded: bool
    """Under FSDP: accumulated unsharded until a stage's last microbatch."""
    from_before: bool
    """An earlier forward and backward of the same step left some, not sharded."""
    shards: float
    """1 where a stage's reduced gradients are new memory, else 0."""


Held = tuple[float, float, float, float]
"""Activations, attention scores, logits and gradients that a rank holds before a backward, bytes."""


def held_at(stages: list[Stage], moment: Moment, k: Costs, of_rank: RankGradients) -> Held:
    """What the rank holds besides what it always holds."""
    position, all_in_flight, all_pending, accumulated, kind, late, reduced, kept_gradients, kept_outputs = (
        moment
    )
    is_sharded, from_before, shards = of_rank
    activations, scores, gradients = kept_gradients * k.hidden, 0.0, 0.0
    logits = kept_outputs * k.logits
    for stage, in_flight, pending, has_gradients, is_late, is_reduced in zip(
        stages, all_in_flight, all_pending, accumulated, late, reduced, strict=True
    ):
        activations += in_flight * stage.activations
        scores += in_flight * stage.scores
        logits += (in_flight - pending) * stage.logits
        if pending:
            activations += pending * stage.halves.retained
            logits += pending * stage.retained_logits
        if is_sharded and is_reduced:
            gradients += shards * stage.stored_bytes - stage.compute_params_bytes
            continue
        if has_gradients or from_before or (is_late and not is_sharded):
            gradients += stage.gradient_bytes
        if is_late and is_sharded:
            gradients += stage.compute_params_bytes
    # several stages' schedules wait for each send, 1F1B and GPipe only before the next one
    is_sending = kind == BACKWARD and len(stages) == 1 and (from_before or accumulated[position])
    if is_sending and not stages[position].is_first:
        activations += k.hidden  # the previous input gradient is still being sent
    return activations, scores, logits, max(0.0, gradients)


def rows_of(
    moment: Moment, stage: Stage, held: Held, of_rank: RankGradients, k: Costs
) -> list[tuple[str, Row]]:
    """What one backward of a stage can peak at."""
    kind, is_late = moment.kind, moment.late[moment.position]
    accumulated = of_rank.from_before or moment.accumulated[moment.position]
    if not stage.is_first and kind != BACKWARD:
        if kind == WEIGHT:
            return [_weight_half(stage, held, is_late or (accumulated and not of_rank.is_sharded))]
        return _input_half(stage, held, is_late and of_rank.is_sharded, accumulated, k)
    activations, scores, logits, gradients = held
    working, scores_backward = k.working_set, k.scores_backward
    if not stage.is_first and not stage.is_last:
        row = (activations, scores, logits, gradients, 0.0, 0.0, working, scores_backward, 0.0)
        return [("block_backward", row)]
    rows: list[tuple[str, Row]] = []
    table = k.table if accumulated else 0.0  # a second gradient beside the accumulated one
    before, in_block, of_block, gradient = activations, logits, gradients, 0.0
    if stage.is_last:
        rows.append(_at_loss(stage, held, k))
        after = logits + (k.logits - k.saved_by_loss)
        rows.append(
            (
                "output_weight_gradient",
                (activations, scores, after, gradients, table, k.hidden, 0.0, 0.0, 0.0),
            )
        )
        before, in_block = activations - k.norm_output, logits - k.saved_by_loss
        of_block, gradient = gradients + (0.0 if accumulated else k.table), k.hidden
    rows.append(
        ("block_backward", (before, scores, in_block, of_block, 0.0, gradient, working, scores_backward, 0.0))
    )
    if stage.is_first:
        row = (
            activations - stage.activations + k.hidden,  # of this microbatch the stage's output is left
            scores - stage.scores,
            logits - stage.logits,
            gradients,
            table + k.embedding_full,
            k.hidden,
            0.0,
            0.0,
            k.embedding_scratch,
        )
        rows.append(("embedding_backward", row))
    return rows


def _at_loss(stage: Stage, held: Held, k: Costs) -> tuple[str, Row]:
    activations, scores, logits, gradients = held
    row = (activations, scores, logits + (k.loss - stage.logits), gradients, 0.0, 0.0, 0.0, 0.0, 0.0)
    return "loss_backward", row


def _weight_half(stage: Stage, held: Held, has_gradients: bool) -> tuple[str, Row]:
    new = 0.0 if has_gradients else stage.halves.weight_gradients
    row = (*held[:3], held[3] + new, 0.0, 0.0, stage.halves.weight_peak, 0.0, 0.0)
    return WEIGHT_HALF, row


def _input_half(stage: Stage, held: Held, joins: bool, accumulated: bool, k: Costs) -> list[tuple[str, Row]]:
    """``joins``: as it goes, gradients of an earlier weight half are added to the accumulated ones."""
    activations, scores, logits, gradients = held
    rows = [_at_loss(stage, held, k)] if stage.is_last else []
    in_block = logits + (stage.retained_logits - stage.logits)
    working = stage.halves.input_peak
    joined = 0.0  # gradients at the first block against those at the last, where the half begins
    if joins:
        joined = (0.0 if accumulated else stage.gradient_bytes) - stage.compute_params_bytes
    if joined + stage.halves.input_kept > 0:
        gradients, working = gradients + joined, working + stage.halves.input_kept
    row = (activations, scores, in_block, gradients, 0.0, 0.0, working, 0.0, 0.0)
    return [*rows, ("block_backward", row)]


def most_of_half(stage: Stage) -> float:
    """What neither half of a backward exceeds beyond what is retained, gradients of weights left out."""
    halves = stage.halves
    return max(halves.input_kept + halves.input_peak, halves.weight_peak)


def row_items(row: Row) -> dict[str, float]:
    """A row by item, bytes."""
    return dict(zip(ROW_ITEMS, row, strict=True))
