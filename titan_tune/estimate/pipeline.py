"""Peak memory of each pipeline rank: its stages, its schedule, its receive buffers.

PP alone was held against H200 runs (1F1B, torch 2.11); PP with FSDP or TP follows the source of
``torch.distributed.pipelining`` and was not measured. FSDP under PP keeps weights gathered
(``reshard_after_forward`` default) and accumulates unsharded fp32 gradients until the last
microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from titan_tune.domain.estimate import Phase
from titan_tune.domain.settings import Pipeline, Settings
from titan_tune.errors import InputError
from titan_tune.estimate.activations import saved_block_bytes, saved_blocks
from titan_tune.estimate.backward import experts_backward, working_set
from titan_tune.estimate.parameters import NotCoveredError, ParamPath, Recompute, Shapes
from titan_tune.estimate.phases import (
    ADAM_MOMENTS,
    embedding_scratch_bytes,
    loss_bytes,
    sharded_state,
    tail_bytes,
)
from titan_tune.estimate.schedule import (
    INPUT,
    SINGLE_STAGE_SCHEDULES,
    WEIGHT,
    Moment,
    moments,
    stages_of_rank,
)

WEIGHT_HALF_RECOMPUTATIONS = 6
"""Of the seven linears of a block, all but the first still hold what they recomputed (torch 2.13)."""
REDUCE_BYTES = 4
"""``mixed_precision_reduce``: torchtitan 0.2.2 allows float32 only."""


class Split(NamedTuple):
    """How a pipeline cuts the model: blocks of each stage, stages of each rank."""

    layers: tuple[int, ...]
    stages_per_rank: int


def split_model(pipeline: Pipeline, *, pp: int, num_layers: int) -> Split:
    """torchtitan's stage split (``pipeline_llm``).

    Raises:
        NotCoveredError: when the job names the modules of each stage itself.
        InputError: when the model cannot be cut so; torchtitan refuses it as well.
    """
    if pipeline.explicit_split:
        raise NotCoveredError(
            "parallelism.module_fqns_per_model_part (or a schedule CSV) is set: the formula covers "
            "torchtitan's own stage split only"
        )
    single = pipeline.schedule.lower() in SINGLE_STAGE_SCHEDULES
    weights = pipeline.first_stage_less_layers + pipeline.last_stage_less_layers
    if pipeline.layers_per_stage is None:
        num_stages = pp if single else 2 * pp
    else:
        num_stages = math.ceil((num_layers + weights) / pipeline.layers_per_stage)
    if num_stages % pp:
        raise InputError(
            f"parallelism.pipeline_parallel_layers_per_stage = {pipeline.layers_per_stage}: gives {num_stages} "
            f"stages, which {pp} pipeline ranks do not divide"
        )
    layers = stage_layers(
        num_layers, num_stages, pipeline.first_stage_less_layers, pipeline.last_stage_less_layers
    )
    return Split(layers, num_stages // pp)


@lru_cache(maxsize=1024)
def stage_layers(num_layers: int, num_stages: int, input_weight: int, output_weight: int) -> tuple[int, ...]:
    """Blocks of each stage, as torchtitan's ``generate_llm_fqn_per_model_part`` deals them out."""
    if num_stages == 1:
        return (num_layers,)
    per_stage, extra = divmod(num_layers + input_weight + output_weight, num_stages)
    if per_stage < max(1, input_weight, output_weight):
        raise InputError(
            f"parallelism.pipeline_parallel_degree: {num_layers} layers do not fill {num_stages} stages "
            f"(at least {max(1, input_weight, output_weight)} a stage)"
        )
    shares = [per_stage + (stage < extra) for stage in range(num_stages)]
    shares[0] -= input_weight
    shares[-1] -= output_weight
    return tuple(shares)


class _Stage(NamedTuple):
    """One stage on its rank; sizes in bytes."""

    is_first: bool
    is_last: bool
    params: float
    """Parameters on one TP rank, not sharded."""
    stored_bytes: float
    """What this rank stores of them; their gradients and each Adam moment take the same."""
    activations: float
    """Of one microbatch in flight, logits and loss left out."""
    scores: float
    logits: float
    """Logits and what the loss saved, of one microbatch."""
    gradient_bytes: float
    """Of its accumulated gradients."""
    retained: float
    """What one microbatch keeps between the two halves of a split backward, beyond ``activations``."""
    recomputed: float
    """What the weight half of a split backward holds beyond that."""


class _Held(NamedTuple):
    """What a rank holds before a backward, bytes, and whether the stage has gradients already."""

    activations: float
    scores: float
    logits: float
    gradients: float
    accumulated: bool


class _Delta(NamedTuple):
    """What a moment of a backward adds to that, bytes."""

    activations: float = 0.0
    scores: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    new_gradients: float = 0.0
    dout: float = 0.0
    working_set: float = 0.0
    scores_backward: float = 0.0
    embedding_scratch: float = 0.0


class _BackwardCosts(NamedTuple):
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


def _local_logits(s: Shapes) -> float:
    return s.tokens * s.vocab / (s.tp if s.loss_parallel else 1)


def _saved_by_loss(s: Shapes) -> float:
    """fp32 log-probabilities: eager and loss-parallel loss keep them from forward to backward."""
    return 4 * _local_logits(s) if s.loss_parallel or not s.compile_loss else 0.0


def _backward_costs(s: Shapes) -> _BackwardCosts:
    working, scores = working_set(s)
    if s.moe is not None:  # what a block's backward holds beyond what it saved
        mode = Recompute.NONE if s.recompute is Recompute.EVERY else s.recompute
        peak = max(m.contents + m.gradients for m in experts_backward(s, mode))
        working = max(working, peak - saved_block_bytes(s, mode, True))
    return _BackwardCosts(
        working_set=working,
        scores_backward=scores,
        loss=loss_bytes(s, logits_held=True),
        logits=s.compute_bytes * _local_logits(s),
        saved_by_loss=_saved_by_loss(s),
        hidden=s.residual_stream_bytes,
        norm_output=s.compute_bytes * s.tokens * s.dim,
        table=s.compute_bytes * s.embedding_shard_params,
        embedding_full=s.compute_bytes * s.dim * (s.vocab + s.tokens) * (1 - 1 / s.tp),
        embedding_scratch=embedding_scratch_bytes(s),
    )


def pipeline_phases(settings: Settings, shapes: Shapes) -> tuple[tuple[Phase, ...], ...]:
    """The phases of every pipeline rank, first to last."""
    pipeline = settings.pipeline
    split = split_model(pipeline, pp=shapes.pp, num_layers=shapes.layers)
    microbatches = max(1, settings.local_batch_size // pipeline.microbatch_size)
    costs = _backward_costs(shapes)
    alike: dict[_Key, _Stage] = {}
    ranks = []
    for rank in range(shapes.pp):
        stages = _stages_of_rank(shapes, split, pipeline.schedule, rank, alike)
        backwards = moments(pipeline.schedule, rank, shapes.pp, split.stages_per_rank, microbatches)
        ranks.append(_rank_phases(shapes, stages, backwards, microbatches, costs))
    return tuple(ranks)


_Key = tuple[int, bool, bool, int, int]


def _stages_of_rank(
    s: Shapes, split: Split, schedule: str, rank: int, alike: dict[_Key, _Stage]
) -> list[_Stage]:
    """The rank's stages; ``alike`` remembers those that other ranks have as well."""
    stages, built, last = [], 0, len(split.layers) - 1
    for number in stages_of_rank(schedule, rank, s.pp, split.stages_per_rank):
        num_layers = split.layers[number]
        counted = built if s.recompute is Recompute.EVERY else 0
        first = 0 if s.moe is None else sum(split.layers[:number])
        key = (num_layers, number == 0, number == last, first, counted)
        if key not in alike:
            alike[key] = _stage(s, *key)
        stages.append(alike[key])
        built += num_layers
    return stages


def _stage(s: Shapes, num_layers: int, is_first: bool, is_last: bool, first: int, counted: int) -> _Stage:
    ends = (is_first + is_last) * s.embedding_shard_params + (s.dim if is_last else 0)
    params = s.gathered_blocks(first, first + num_layers) + ends
    stored = (
        s.block_param_bytes * s.stored_blocks(first, first + num_layers) + s.param_bytes * ends / s.shards
    )
    activations, scores = saved_blocks(s, num_layers, first, counted)
    if not is_first and num_layers:  # the first block's input is the receive buffer
        activations -= s.residual_stream_bytes
    logits = 0.0
    if is_last:
        activations += tail_bytes(s)
        logits = _local_logits(s) * s.compute_bytes + _saved_by_loss(s)
    else:
        activations += s.residual_stream_bytes  # stage output, kept for its backward
    if s.path is ParamPath.FSDP:
        gradients = REDUCE_BYTES * params
    else:  # TP: the embedding's gradient keeps full-vocabulary storage
        beyond_shard = s.vocab * s.dim * (1 - 1 / s.tp) if is_first else 0.0
        gradients = s.param_bytes * (params + beyond_shard)
    retained = recomputed = 0.0
    if not is_first:  # torch skips the input half on the first stage
        retained = num_layers * s.residual_stream_bytes
        routed = s.num_moe_layers(first, first + num_layers)
        recomputed = (num_layers - routed) * _recomputed_for_weights(s, False)
        recomputed += routed * _recomputed_for_weights(s, True) if routed else 0.0
    return _Stage(
        is_first, is_last, params, stored, activations, scores, logits, gradients, retained, recomputed
    )


def _recomputed_for_weights(s: Shapes, is_moe: bool) -> float:
    """What one checkpointed block holds in the weight half of a split backward. torch runs it once per
    weight, and a checkpoint recomputes once per run: so many copies are there at the end (traced)."""
    if s.recompute is Recompute.NONE:
        return 0.0
    share = 1.0
    mode = s.recompute
    if mode is Recompute.EVERY:
        mode, share = Recompute.FULL, 1 / s.every
    none, saved = (saved_block_bytes(s, kept, is_moe) for kept in (Recompute.NONE, mode))
    copies = WEIGHT_HALF_RECOMPUTATIONS * max(0.0, none - saved)
    return share * (copies + s.compute_bytes * s.gathered_params(is_moe))


def _rank_phases(
    s: Shapes,
    stages: list[_Stage],
    backwards: tuple[Moment, ...],
    microbatches: int,
    costs: _BackwardCosts,
) -> tuple[Phase, ...]:
    base = _always_held(s, stages, microbatches)
    best: dict[str, tuple[float, _Held, _Delta]] = {}
    for moment in backwards:
        stage, held = _held_at(s, stages, moment)
        for name, delta in _backward_phases(moment.kind, stage, held, costs):
            total = sum(held[:4]) + sum(delta)
            if name not in best or total > best[name][0]:
                best[name] = total, held, delta
    return (
        *(_phase(name, base, held, delta) for name, (_, held, delta) in best.items()),
        *_step_phases(s, stages, base),
    )


def _always_held(s: Shapes, stages: list[_Stage], microbatches: int) -> dict[str, float]:
    """States, gathered weights, and receive buffers of all microbatches (allocated once)."""
    params, stored = sum(stage.params for stage in stages), sum(stage.stored_bytes for stage in stages)
    if s.path is ParamPath.FSDP:
        base = sharded_state(s, stored)
        base["gathered_kept"] = s.compute_bytes * params
        if s.accumulates and not s.offload:
            base["gradients"] = stored
    else:
        base = {
            "parameters": stored,
            "optimizer": ADAM_MOMENTS * stored,
            "framework": s.framework_bytes,
        }
    neighbours = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    base["receive_buffers"] = microbatches * s.residual_stream_bytes * neighbours
    base["framework"] += (len(stages) - 1) * s.attention.rope_bytes * s.seq_full  # a RoPE table a stage
    return base


def _held_at(s: Shapes, stages: list[_Stage], moment: Moment) -> tuple[_Stage, _Held]:
    """The stage that runs a backward, and what its rank holds just before."""
    plain_accumulates = s.accumulates and s.path is not ParamPath.FSDP
    activations = scores = logits = gradients = 0.0
    for stage, in_flight, pending, done in zip(
        stages, moment.in_flight, moment.pending, moment.accumulated, strict=True
    ):
        activations += in_flight * stage.activations + pending * stage.retained
        scores += in_flight * stage.scores
        logits += in_flight * stage.logits
        if done or plain_accumulates:
            gradients += stage.gradient_bytes
    running = stages[moment.position]
    accumulated = plain_accumulates or moment.accumulated[moment.position]
    if accumulated and not running.is_first:  # the previous input gradient is still being sent
        activations += s.residual_stream_bytes
    return running, _Held(activations, scores, logits, gradients, accumulated)


def _backward_phases(
    kind: str, stage: _Stage, held: _Held, k: _BackwardCosts
) -> Iterator[tuple[str, _Delta]]:
    """What one backward can peak at, as differences from what is held before it."""
    if kind == WEIGHT and not stage.is_first:
        yield "weight_backward", _Delta(working_set=stage.recomputed)
        return
    if kind == INPUT and stage.is_first:
        return
    block = _Delta(working_set=k.working_set, scores_backward=k.scores_backward)
    table = k.table if held.accumulated else 0.0  # a second gradient beside the accumulated one
    if stage.is_last:
        yield "loss_backward", _Delta(logits=k.loss - stage.logits)
        yield (
            "output_weight_gradient",
            _Delta(logits=k.logits - k.saved_by_loss, new_gradients=table, dout=k.hidden),
        )
        block = block._replace(
            activations=-k.norm_output,
            logits=-k.saved_by_loss,
            gradients=0.0 if held.accumulated else k.table,
            dout=k.hidden,
        )
    yield "block_backward", block
    if stage.is_first:
        yield (
            "embedding_backward",
            _Delta(
                activations=-stage.activations,
                scores=-stage.scores,
                logits=-stage.logits,
                new_gradients=table + k.embedding_full,
                dout=k.hidden,
                embedding_scratch=k.embedding_scratch,
            ),
        )


def _phase(name: str, base: dict[str, float], held: _Held, delta: _Delta) -> Phase:
    items = base | {
        "activations": held.activations + delta.activations,
        "attention_scores": held.scores + delta.scores,
        "logits_loss": held.logits + delta.logits,
        "unsharded_gradients": held.gradients + delta.gradients,
        "new_gradients": delta.new_gradients,
        "residual_gradient": delta.dout,
        "working_set": delta.working_set,
        "attention_scores_backward": delta.scores_backward,
        "embedding_scratch": delta.embedding_scratch,
    }
    return Phase(name, items)


def _step_phases(s: Shapes, stages: list[_Stage], base: dict[str, float]) -> tuple[Phase, ...]:
    params, stored = sum(stage.params for stage in stages), sum(stage.stored_bytes for stage in stages)
    if s.path is not ParamPath.FSDP:
        return (Phase("optimizer", base | {"gradients": sum(stage.gradient_bytes for stage in stages)}),)
    has_table = any(stage.is_first or stage.is_last for stage in stages)
    block = s.gathered_params(s.is_moe(s.layers - 1))
    largest = max(block, s.embedding_shard_params if has_table else 0.0)
    scatter = {
        "unsharded_gradients": REDUCE_BYTES * params,
        "reduce_scatter_input": REDUCE_BYTES * largest,
    }
    gradients = 0.0 if s.offload else stored
    return (
        Phase("gradient_reduce_scatter", base | scatter),
        Phase("optimizer", base | {"gradients": gradients}),
    )
