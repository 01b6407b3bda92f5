"""Phases of a training step without pipeline parallelism: one GPU and DDP, FSDP, TP alone.

The peak is the maximum over phases, each an itemised sum of bytes on one rank. Formulas come from
the torchtitan 0.2.2 source and whole-step traces and were held against H200 runs (torch 2.11).
"""

from __future__ import annotations

from titan_tune.domain.estimate import Phase
from titan_tune.estimate.activations import (
    block_mode,
    saved_block_bytes,
    saved_blocks,
    saved_scores_bytes,
    saved_weights_of_blocks,
    working_set,
)
from titan_tune.estimate.parameters import ParamPath, Shapes

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
    size, params, table = s.param_bytes, s.local_params, s.vocab * s.dim
    state = {"parameters": size * params, "optimizer": ADAM_MOMENTS * size * params}
    if s.replicate > 1:  # gradient_as_bucket_view is off: buckets are a second copy, always there
        state["ddp_buckets"] = size * params
    state["framework"] = s.framework_bytes
    earlier = size * params if s.accumulates else 0.0
    activations, scores = saved_blocks(s, s.layers)
    output_copy = 2.0 * table if size == 4 else 0.0
    held = {"activations": activations, "attention_scores": scores}
    tail = tail_bytes(s)
    loss = loss_bytes(s) + (8 * s.tokens if s.compile_loss else 0)
    phases = [
        Phase(
            "loss_backward",
            state
            | held
            | {
                "gradients": earlier,
                "tail_activations": tail,
                "autocast_weights": output_copy,
                "logits_loss": loss,
            },
        )
    ]
    if not s.compile_loss and size == 4:
        # autocast's weight cache lives until its context ends, after the loss
        cache = 2.0 * s.layers * s.block_matmul
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
    block = s.block_matmul + s.block_norm
    phases += _block_phases(s, state, held, dout, size * (table + s.dim), size * (params - table - block))
    every_gradient = state | {"gradients": size * params}
    phases.append(
        Phase(
            "embedding_backward",
            every_gradient
            | {
                "residual_gradient": dout,
                "embedding_scratch": embedding_scratch_bytes(s),
                "new_gradients": size * table if s.accumulates else 0.0,
            },
        )
    )
    phases.append(Phase("optimizer", every_gradient))
    return tuple(phases)


def _block_phases(
    s: Shapes,
    state: dict[str, float],
    held: dict[str, float],
    dout: float,
    first_gradients: float,
    last_gradients: float,
    last_block_extra: dict[str, float] | None = None,
    first_block_extra: dict[str, float] | None = None,
) -> list[Phase]:
    """Backward of the last block (all activations there) and of the first (nearly all gradients)."""
    need, score_need = working_set(s)
    all_gradients = s.param_bytes * s.local_params
    mode = block_mode(s, 0)
    common = {
        "residual_gradient": dout,
        "working_set": need,
        "attention_scores_backward": score_need,
    }
    last = state | held | common
    last["gradients"] = all_gradients if s.accumulates else first_gradients
    first = state | common
    first["activations"] = saved_block_bytes(s, mode)
    first["attention_scores"] = saved_scores_bytes(s, mode)
    first["gradients"] = all_gradients if s.accumulates else last_gradients
    return [
        Phase("last_block_backward", last | (last_block_extra or {})),
        Phase("first_block_backward", first | (first_block_extra or {})),
    ]


def fsdp_phases(s: Shapes) -> tuple[Phase, ...]:
    """``fully_shard`` (FSDP, HSDP, CP, each with or without TP)."""
    size, params, compute = s.param_bytes, s.local_params, s.compute_bytes
    table, block = s.embedding_shard_params, s.block_shard_params
    output = table + s.dim
    activations, scores = saved_blocks(s, s.layers)
    held = {"activations": activations, "attention_scores": scores}
    state = sharded_state(s, params)
    earlier = 0.0 if s.offload or not s.accumulates else size * params
    sharded = 0.0 if s.offload else 1.0  # gradients go to the CPU as they are reduced
    gathered_block = block_gather_bytes(s)
    gathered_output = compute * output
    kept = compute * (s.layers * block + table) if s.keep_gathered else 0.0
    dout = compute * s.tokens * s.dim / s.tp
    around_block = {
        "gathered_block": 0.0 if kept else 2 * gathered_block,  # this block's and the prefetched one
        "gathered_kept": kept,
    }
    loss = {"tail_activations": tail_bytes(s), "gradients": earlier, "gathered_kept": kept}
    logits = loss_bytes(s)
    phases = [
        Phase(
            "loss_backward",
            state
            | held
            | loss
            | {
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
    all_but_first = params - (table + block) / s.shards
    scatter_output = {
        "reduce_buffers": buffers * output,
        "residual_gradient": dout,
        "unsharded_gradients": compute * output,
        "reduce_scatter_input": 4 * output,
        "gathered_kept": kept,
        "gathered_block": 0.0 if kept else gathered_block,
        "gradients": earlier + output_shard,
    }
    phases.append(Phase("output_reduce_scatter", state | held | scatter_output))
    scatter_embedding = {
        "reduce_buffers": buffers * s.shards * params,
        "gradients": sharded * size * params,
        "new_gradients": shard_of * table if s.accumulates else 0.0,
        "unsharded_gradients": compute * s.vocab * s.dim,  # TP: keeps full-vocabulary storage
        "reduce_scatter_input": 4 * table,
    }
    first_gathered = gathered_block + (0.0 if kept else compute * table)
    first_extra = {
        "reduce_scatter_input": 4 * block,
        "gathered_block": first_gathered,
        "reduce_buffers": buffers * s.shards * all_but_first,
    }
    last_extra = {
        "reduce_scatter_input": 4 * output,
        "reduce_buffers": buffers * output,
        **around_block,
    }
    if s.offload:
        first_extra["gradients"] = last_extra["gradients"] = 0.0
    phases += _block_phases(
        s,
        state,
        held,
        dout,
        output_shard,
        size * all_but_first,
        last_extra,
        first_extra,
    )
    phases.append(Phase("embedding_reduce_scatter", state | scatter_embedding))
    phases.append(Phase("optimizer", state | {"gradients": sharded * size * params}))
    return tuple(phases)


def sharded_state(s: Shapes, params: float) -> dict[str, float]:
    """What a ``fully_shard`` rank holds all the time: masters and Adam moments."""
    size = s.param_bytes
    state = {"framework": s.framework_bytes}
    if s.offload:  # shards live on the CPU; two blocks' copies are on their way
        state["parameters"] = 2 * size * s.block_shard_params / s.shards
        return state
    state["parameters"] = size * params
    state["optimizer"] = ADAM_MOMENTS * size * params
    return state


def keeps_reduce_buffers(s: Shapes) -> bool:
    """HSDP keeps every group's fp32 all-reduce buffer to the end of backward; it is the gradient
    itself unless that is accumulated, stored in another dtype or moved to the CPU (torch 2.13)."""
    return s.replicate > 1 and (s.accumulates or s.param_bytes != 4 or s.offload)


def block_gather_bytes(s: Shapes) -> float:
    """One gathered block: one byte a linear weight with float8 all-gather."""
    if s.float8_all_gather:
        return s.block_matmul / s.tp + s.compute_bytes * s.block_norm
    return s.compute_bytes * s.block_shard_params


def plain_phases(s: Shapes) -> tuple[Phase, ...]:
    """TP alone (or one GPU without autocast): no mixed precision."""
    size, params, table = s.param_bytes, s.local_params, s.embedding_shard_params
    state = {
        "parameters": size * params,
        "optimizer": ADAM_MOMENTS * size * params,
        "framework": s.framework_bytes,
    }
    # TP: the row-sharded embedding's gradient keeps full-vocabulary storage
    beyond_shard = size * (s.vocab * s.dim - table)
    if s.accumulates:
        state["unsharded_gradients"] = beyond_shard
    activations, scores = saved_blocks(s, s.layers)
    held = {"activations": activations, "attention_scores": scores}
    dout = size * s.tokens * s.dim / s.tp
    loss = {
        "gradients": size * params if s.accumulates else 0.0,
        "tail_activations": tail_bytes(s),
        "logits_loss": loss_bytes(s),
    }
    step = {  # the fused step clones the shard
        "gradients": size * params,
        "unsharded_gradients": beyond_shard,
        "new_gradients": size * table if s.tp > 1 else 0.0,
    }
    embedding = {
        "gradients": size * params,
        "unsharded_gradients": beyond_shard * (2 if s.accumulates else 1),
        "new_gradients": size * table if s.accumulates else 0.0,
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
            state,
            held,
            dout,
            size * (table + s.dim),
            size * (params - table - s.block_shard_params),
        ),
        Phase("embedding_backward", state | embedding),
        Phase("optimizer", state | step),
    )
