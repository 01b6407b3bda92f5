"""Phases of a training step without pipeline parallelism: one GPU and DDP, FSDP, TP alone.

The peak is the maximum over phases, each an itemised sum of bytes on one rank. Formulas come from
the torchtitan 0.2.2 source and whole-step traces and were held against H200 runs (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from titan_tune.domain.estimate import Phase
from titan_tune.estimate.activations import (
    Saved,
    block_mode,
    saved_block_bytes,
    saved_by_depth,
    saved_weights_of_blocks,
)
from titan_tune.estimate.backward import ExpertsBackward, experts_backward, working_set
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes

EMBEDDING_SORT_MIN_TOKENS = 3072
"""``embedding_dense_backward`` sorts its indices from here on."""
EMBEDDING_ROWS_PER_THREAD = 10
ADAM_MOMENTS = 2


def phases_of(shapes: Shapes) -> tuple[Phase, ...]:
    """All candidate peaks of a job without pipeline stages."""
    if shapes.path is ParamPath.AUTOCAST:
        return autocast_phases(shapes)
    if shapes.path is ParamPath.FSDP:
        return fsdp_phases(shapes)
    return plain_phases(shapes)


def loss_bytes(s: Shapes, *, logits_held: bool = False) -> float:
    """Logits, their fp32 copies and gradients at the start of backward.

    ``logits_held`` adds the logits that the caller still holds (a pipeline schedule does; eager
    loss alone would have freed them).
    """
    size, logits = s.compute_bytes, float(s.tokens * s.vocab)
    if s.loss_parallel:
        logits /= s.tp
        needed = (size + 8) * logits if s.compile_loss else 16 * logits
    else:
        needed = 2 * size * logits if s.compile_loss else 12 * logits
    return needed + (size * logits if logits_held and not s.compile_loss else 0)


def tail_bytes(s: Shapes) -> float:
    """Last block's output, final norm output (gathered to full width) and its reciprocal deviation."""
    hidden = s.tokens * s.dim
    return s.residual_bytes * hidden / s.tp + s.compute_bytes * hidden + 4 * s.tokens / s.tp


def whole_logits_items(s: Shapes) -> dict[str, float]:
    """Forward of the output without loss parallelism: the local logits, their gathered pieces and the
    whole that these are joined to; the norm output's shard is still there."""
    logits = s.compute_bytes * s.tokens * s.vocab
    return {"logits_loss": logits * (2 + 1 / s.tp), "residual_gradient": s.residual_stream_bytes}


def embedding_scratch_bytes(s: Shapes) -> float:
    """fp32 partial sums of the sorted-index embedding backward."""
    if s.tokens <= EMBEDDING_SORT_MIN_TOKENS:
        return 0.0
    return 4.0 * s.dim * (s.tokens // EMBEDDING_ROWS_PER_THREAD + min(s.tokens, s.vocab))


def autocast_phases(s: Shapes) -> tuple[Phase, ...]:
    """One GPU or DDP: fp32 (or ``training.dtype``) masters, bf16 compute under autocast."""
    size, held_bytes, table = s.param_bytes, s.local_param_bytes, s.vocab * s.dim
    state = {"parameters": held_bytes, "optimizer": ADAM_MOMENTS * held_bytes}
    if s.replicate > 1:  # gradient_as_bucket_view is off: buckets are a second copy, always there
        state["ddp_buckets"] = held_bytes
    state["framework"] = s.framework_bytes
    earlier = held_bytes if s.accumulates else 0.0
    saved = saved_by_depth(s)
    activations, scores = saved(s.layers)
    output_copy = 2.0 * table if size == 4 else 0.0
    held = {"activations": activations, "attention_scores": scores}
    tail = tail_bytes(s)
    loss = loss_bytes(s) + (8 * s.tokens if s.compile_loss else 0)
    phases = [
        Phase(
            "loss_backward",
            {
                **state,
                **held,
                "gradients": earlier,
                "tail_activations": tail,
                "autocast_weights": output_copy,
                "logits_loss": loss,
            },
        )
    ]
    if not s.compile_loss and size == 4:
        # autocast's weight cache lives until its context ends, after the loss
        cache = 2.0 * s.gathered_blocks(0, s.layers) if s.moe else 2.0 * s.layers * s.block_matmul
        if s.float8:  # casts its weights itself
            cache = 0.0
        forward = {
            "activations": activations - saved_weights_of_blocks(s),
            "attention_scores": scores,
            "gradients": earlier,
            "tail_activations": tail,
            "autocast_weights": cache + output_copy,
            "logits_loss": 10.0 * s.tokens * s.vocab,
        }
        phases.append(Phase("loss_forward", state | forward))
    dout = size * s.tokens * s.dim
    around = _Around(state, saved, dout, _gradients_behind(s, size * (table + s.dim)), _no_buffers, {})
    phases += _block_phases(s, around)
    every_gradient = state | {"gradients": held_bytes}
    phases.append(
        Phase(
            "embedding_backward",
            {
                **every_gradient,
                "residual_gradient": dout,
                "embedding_scratch": embedding_scratch_bytes(s),
                "new_gradients": size * table if s.accumulates or s.tables == 1 else 0.0,
            },
        )
    )
    phases.append(Phase("optimizer", every_gradient))
    return tuple(phases)


class _Around(NamedTuple):
    """What surrounds the backward of one block: how it depends on the block's position."""

    state: Mapping[str, float]
    saved: Saved
    dout: float
    gradients: Callable[[int], float]
    """Of the blocks behind that one and of the output, bytes."""
    extra: Callable[[int], dict[str, float]]
    """Buffers of ``fully_shard`` around that block."""
    working_sets: dict[Recompute, tuple[float, float]]
    """:func:`working_set` of the dense blocks, filled as it is asked for."""


def _no_buffers(layer: int) -> dict[str, float]:
    return {}


def _block_phases(s: Shapes, around: _Around) -> list[Phase]:
    """Backward of the last block (all activations there), of the first (nearly all gradients) and of
    one between that can be higher: behind it waits a whole block's gradient."""
    last = s.layers - 1
    phases = [_backward_of(s, around, last, "last_block_backward")]
    between = [_backward_of(s, around, layer, "block_backward") for layer in _layers_between(s)]
    if between:
        phases.append(max(between, key=_total))
    if last > 0:
        phases.append(_backward_of(s, around, 0, "first_block_backward"))
    return phases


def _layers_between(s: Shapes) -> Sequence[int]:
    last = s.layers - 1
    if s.moe is None:
        is_heavier = s.path is ParamPath.FSDP and s.gathered_params(False) > s.gathered_table_params
        return (1, last - 1) if is_heavier and last > 1 else ()
    first = s.moe.num_dense_layers + (s.moe.layer_step - 1)
    layers = {last - 1, last - 2, first, first + 1, first + s.moe.layer_step}
    return sorted(layer for layer in layers if 0 < layer < last)


def _backward_of(s: Shapes, around: _Around, layer: int, name: str) -> Phase:
    """The peak of one block's backward, where it has several moments the highest of them."""
    activations, scores = around.saved(layer + 1)
    items = {
        **around.state,
        "activations": activations,
        "attention_scores": scores,
        "residual_gradient": around.dout,
        "gradients": around.gradients(layer),
        **around.extra(layer),
    }
    mode = block_mode(s, layer)
    if not s.is_moe(layer):
        found = around.working_sets.get(mode)
        if found is None:
            if mode is not s.recompute:
                found = working_set(s._replace(recompute=mode))
            else:
                found = working_set(s, around.saved(1)[0] if s.moe is None else None)
            around.working_sets[mode] = found
        need, score_need = found
        items["working_set"] = need
        items["attention_scores_backward"] = score_need
        return Phase(name, items)
    items["activations"] -= saved_block_bytes(s, mode, True)
    return max((_moment(s, items, m, name) for m in experts_backward(s, mode)), key=_total)


def _total(phase: Phase) -> float:
    return phase.total_bytes


def _moment(s: Shapes, items: dict[str, float], moment: ExpertsBackward, name: str) -> Phase:
    changed = {"working_set": moment.contents, "unsharded_gradients": moment.gradients}
    if moment.reduce_scatter_input is not None and s.path is ParamPath.FSDP:
        changed["reduce_scatter_input"] = moment.reduce_scatter_input
    if not moment.experts_gathered and s.moe is not None and not items.get("gathered_kept"):
        gathered = items.get("gathered_block", 0.0) - s.compute_bytes * s.moe.padded_expert_params
        changed["gathered_block"] = max(0.0, gathered)
    return Phase(name, items | changed)


def _gradients_behind(s: Shapes, output: float) -> Callable[[int], float]:
    """Gradient bytes that a rank holds during the backward of a block; ``output`` are the output's."""
    if s.accumulates:
        every = s.local_param_bytes
        return lambda layer: every
    return lambda layer: output + s.block_param_bytes * s.stored_blocks(layer + 1, s.layers)


def fsdp_phases(s: Shapes) -> tuple[Phase, ...]:
    """``fully_shard`` (FSDP, HSDP, CP, each with or without TP)."""
    size, held_bytes, compute = s.param_bytes, s.local_param_bytes, s.compute_bytes
    table = s.gathered_table_params
    output = table + s.dim
    saved = saved_by_depth(s)
    activations, scores = saved(s.layers)
    held = {"activations": activations, "attention_scores": scores}
    state = sharded_state(s, held_bytes)
    earlier = 0.0 if s.offload or not s.accumulates else held_bytes
    sharded = 0.0 if s.offload else 1.0  # gradients go to the CPU as they are reduced
    gathered_block = block_gather_bytes(s, s.layers - 1)
    gathered_output = compute * output
    kept = compute * (s.gathered_blocks(0, s.layers) + table) if s.keep_gathered else 0.0
    dout = compute * s.tokens * s.dim / s.tp
    loss = {"tail_activations": tail_bytes(s), "gradients": earlier, "gathered_kept": kept}
    logits = loss_bytes(s)
    phases = [
        Phase(
            "loss_backward",
            {
                **state,
                **held,
                **loss,
                "gathered_output": 0.0 if s.reshard_output else gathered_output,
                "logits_loss": logits,
            },
        )
    ]
    if s.tp > 1 and not s.loss_parallel:
        # the output weight's flat gather buffer is still held beside its copy
        gather = whole_logits_items(s) | {"gathered_output": 2 * gathered_output}
        phases.append(Phase("output_gather", state | held | loss | gather))
    if s.reshard_output:  # "always": the output weight is gathered again after the loss backward
        logits_gradient = compute * s.tokens * s.vocab / (s.tp if s.loss_parallel else 1)
        output_backward = {"gathered_output": gathered_output, "logits_loss": logits_gradient}
        phases.append(Phase("output_backward", state | held | loss | output_backward))
    shard_of = size * sharded / s.shards
    output_shard = shard_of * output
    buffers = 4.0 / s.shards if keeps_reduce_buffers(s) else 0.0
    # what is reduced in fp32 and stored in another dtype is held in both while it is cast
    reduced = 4.0 / s.shards if size != 4 and not buffers else 0.0
    scatter_output = {
        "reduce_buffers": buffers * output,
        "reduce_output": reduced * output,
        "residual_gradient": dout,
        "unsharded_gradients": compute * (s.embedding_shard_params + s.dim),
        "reduce_scatter_input": 4 * output,
        "gathered_kept": kept,
        "gathered_block": 0.0 if kept else gathered_block,
        "gradients": earlier + output_shard,
    }
    phases.append(Phase("output_reduce_scatter", state | held | scatter_output))
    scatter_embedding = {
        "reduce_buffers": buffers * s.shards * s.local_params,
        "reduce_output": reduced * table,
        "gradients": sharded * held_bytes,
        "new_gradients": shard_of * table if s.accumulates or s.tables == 1 else 0.0,
        "unsharded_gradients": compute * s.vocab * s.dim,  # TP: keeps full-vocabulary storage
        "reduce_scatter_input": 4 * table,
    }

    def buffers_around(layer: int) -> dict[str, float]:
        is_last = layer == s.layers - 1
        behind = output if is_last else scattered_params(s, layer + 1)
        # this block's weights and those prefetched for the next
        gathered = block_gather_bytes(s, layer)
        gathered += compute * table if layer == 0 else block_gather_bytes(s, layer - 1)
        extra = {
            "reduce_scatter_input": 4 * behind,
            "gathered_block": 0.0 if kept else gathered,
            "gathered_kept": kept,
        }
        if buffers:
            extra["reduce_buffers"] = (
                buffers * s.shards * (output / s.shards + s.stored_blocks(layer + 1, s.layers))
            )
        if s.offload:
            extra["gradients"] = 0.0
        return extra

    around = _Around(state, saved, dout, _gradients_behind(s, output_shard), buffers_around, {})
    phases += _block_phases(s, around)
    phases.append(Phase("embedding_reduce_scatter", state | scatter_embedding))
    phases.append(Phase("optimizer", state | {"gradients": sharded * held_bytes}))
    return tuple(phases)


def sharded_state(s: Shapes, held_bytes: float) -> dict[str, float]:
    """What a ``fully_shard`` rank holds all the time: masters and Adam moments."""
    state = {"framework": s.framework_bytes}
    if s.offload:  # shards live on the CPU; two blocks' copies are on their way
        state["parameters"] = 2 * s.block_param_bytes * s.stored_params(s.is_moe(s.layers - 1))
        return state
    state["parameters"] = held_bytes
    state["optimizer"] = ADAM_MOMENTS * held_bytes
    return state


def keeps_reduce_buffers(s: Shapes) -> bool:
    """HSDP keeps every group's fp32 all-reduce buffer to the end of backward; it is the gradient
    itself unless that is accumulated, stored in another dtype or moved to the CPU (torch 2.13)."""
    return s.replicate > 1 and (s.accumulates or s.block_param_bytes != 4 or s.offload)


def block_gather_bytes(s: Shapes, layer: int) -> float:
    """One gathered block: one byte a linear weight with float8 all-gather."""
    is_moe = s.is_moe(layer)
    if not s.float8_all_gather:
        return s.compute_bytes * s.gathered_params(is_moe)
    if not is_moe or s.moe is None:
        return s.block_matmul / s.tp + s.compute_bytes * s.block_norm
    linears = (s.attention.params_split + s.moe.rest_split) / s.tp
    return s.compute_bytes * s.gathered_params(True) - (s.compute_bytes - 1) * linears


def scattered_params(s: Shapes, layer: int) -> float:
    """Parameters of the reduce-scatter that a block's backward ends with; experts with a group of
    their own were scattered before."""
    is_moe = s.is_moe(layer)
    if is_moe and s.moe is not None and s.moe.own_group:
        return s.gathered_rest_params
    return s.gathered_params(is_moe)


def plain_phases(s: Shapes) -> tuple[Phase, ...]:
    """TP alone (or one GPU without autocast): no mixed precision."""
    size, held_bytes, table = s.param_bytes, s.local_param_bytes, s.embedding_shard_params
    state = {
        "parameters": held_bytes,
        "optimizer": ADAM_MOMENTS * held_bytes,
        "framework": s.framework_bytes,
    }
    # TP: the row-sharded embedding's gradient keeps full-vocabulary storage
    beyond_shard = size * (s.vocab * s.dim - table)
    if s.accumulates:
        state["unsharded_gradients"] = beyond_shard
    saved = saved_by_depth(s)
    activations, scores = saved(s.layers)
    held = {"activations": activations, "attention_scores": scores}
    dout = size * s.tokens * s.dim / s.tp
    loss = {
        "gradients": held_bytes if s.accumulates else 0.0,
        "tail_activations": tail_bytes(s),
        "logits_loss": loss_bytes(s),
    }
    step = {  # the fused step clones the shard
        "gradients": held_bytes,
        "unsharded_gradients": beyond_shard,
        "new_gradients": size * table if s.tp > 1 else 0.0,
    }
    embedding = {
        "gradients": held_bytes,
        "unsharded_gradients": beyond_shard * (2 if s.accumulates else 1),
        "new_gradients": size * table if s.accumulates or s.tables == 1 else 0.0,
        "residual_gradient": size * s.tokens * s.dim,
        "embedding_scratch": embedding_scratch_bytes(s),
    }
    gathers: tuple[Phase, ...] = ()
    if s.tp > 1 and not s.loss_parallel:
        gathers = (Phase("output_gather", state | held | loss | whole_logits_items(s)),)
    return (
        Phase("loss_backward", state | held | loss),
        *gathers,
        *_block_phases(
            s,
            _Around(state, saved, dout, _gradients_behind(s, size * (table + s.dim)), _no_buffers, {}),
        ),
        Phase("embedding_backward", state | embedding),
        Phase("optimizer", state | step),
    )
