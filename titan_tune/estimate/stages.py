"""How a pipeline cuts the model, and the sizes of one stage."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from titan_tune.domain.settings import Pipeline
from titan_tune.errors import InputError
from titan_tune.estimate.activations import Saved, saved_blocks
from titan_tune.estimate.halves import NO_HALVES, Halves, halves_of
from titan_tune.estimate.parameters import NotCoveredError, ParamPath, Recompute, Shapes
from titan_tune.estimate.phases import tail_bytes
from titan_tune.estimate.schedule import SINGLE_STAGE_SCHEDULES

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


class StageKey(NamedTuple):
    """All that distinguishes the stages of one job."""

    num_layers: int
    is_first: bool
    is_last: bool
    first_layer: int
    """0 where the position in the model does not matter."""
    counted: int
    """Blocks that its rank built before, where every n-th is checkpointed; else 0."""


class Stage(NamedTuple):
    """One stage on its rank; sizes in bytes."""

    is_first: bool
    is_last: bool
    gathered_params: float
    """Parameters on one TP rank, gathered: FSDP's padding included."""
    stored_bytes: float
    """What this rank stores of them; their gradients and each Adam moment take the same."""
    activations: float
    """Of one microbatch in flight, logits and loss left out."""
    scores: float
    logits: float
    """Logits and what the loss saved, of one microbatch."""
    gradient_bytes: float
    """Of its accumulated gradients."""
    compute_params_bytes: float
    """Gradients of one backward in the compute dtype, not sharded."""
    retained_logits: float
    """Logits' gradient, all that one microbatch keeps of ``logits`` between the halves of a split backward."""
    halves: Halves
    """What those halves hold beyond ``activations``."""


def stage_of(s: Shapes, key: StageKey, saved: Saved, *, splits_backward: bool) -> Stage:
    """The sizes of a stage.

    ``saved`` is the job's :func:`saved_by_depth`; ``splits_backward``: whether the schedule runs backwards in
    two halves.
    """
    num_layers, is_first, is_last, first, counted = key
    end = first + num_layers
    table = s.embedding_shard_params
    norm = s.dim if is_last else 0
    ends = (is_first + is_last) * s.gathered_table_params + norm
    params = s.whole_blocks(first, end) + (is_first + is_last) * table + norm
    stored = s.block_param_bytes * s.stored_blocks(first, end) + s.param_bytes * ends / s.shards
    if s.moe is not None or s.recompute is Recompute.EVERY:
        activations, scores = saved_blocks(s, num_layers, first, counted)
    else:
        activations, scores = saved(num_layers)
    hidden = s.residual_stream_bytes
    beyond_shard = 0.0
    if not is_first and num_layers:  # the first block's input is the receive buffer
        activations -= hidden
    logits = retained_logits = 0.0
    if is_last:
        activations += tail_bytes(s)
        retained_logits = local_logits(s) * s.compute_bytes
        logits = retained_logits + saved_by_loss(s)
    else:
        activations += hidden  # stage output, kept for its backward
    if is_first:  # TP: the embedding's gradient, and its fp32 copy, keep full-vocabulary storage
        beyond_shard = s.vocab * s.dim * (1 - 1 / s.tp)
    gradients = (REDUCE_BYTES if s.path is ParamPath.FSDP else s.param_bytes) * (params + beyond_shard)
    halves = NO_HALVES
    if splits_backward and not is_first:  # torch skips the input half on the first stage
        halves = halves_of(s, first, end, is_last=is_last, logits=retained_logits)
    return Stage(
        is_first,
        is_last,
        s.gathered_blocks(first, end) + ends,
        stored,
        activations,
        scores,
        logits,
        gradients,
        s.compute_bytes * params,
        retained_logits,
        halves,
    )


def local_logits(s: Shapes) -> float:
    """Elements of one microbatch's logits on this rank."""
    return s.tokens * s.vocab / (s.tp if s.loss_parallel else 1)


def saved_by_loss(s: Shapes) -> float:
    """fp32 log-probabilities: eager and loss-parallel loss keep them from forward to backward."""
    return 4 * local_logits(s) if s.loss_parallel or not s.compile_loss else 0.0
