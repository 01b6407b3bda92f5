"""Small traces of the real torchtitan, seconds each."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from titan_tune.estimate.items import COMPONENTS
from titan_tune.trace import TraceError, TraceResult, trace_memory

pytestmark = pytest.mark.torchtitan

# 60M-like: torchtitan's llama3 arguments
SMALL = {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 4000, "multiple_of": 256}
DIM, LAYERS, VOCAB, HEADS, KV_WIDTH, FFN = 256, 6, 4000, 8, 128, 768
BATCH, SEQ = 4, 1024
TOKENS = BATCH * SEQ
JOB: dict[str, Any] = {
    "model.name": "llama3",
    "model.flavor": "small",
    "training.local_batch_size": BATCH,
    "training.seq_len": SEQ,
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
BLOCK = 2 * DIM * DIM + 2 * DIM * KV_WIDTH + 3 * DIM * FFN + 2 * DIM
PARAMETERS = LAYERS * BLOCK + 2 * VOCAB * DIM + DIM


def trace(world_size: int = 1, rank: int = 0, layers: int | None = None, **values: Any) -> TraceResult:
    keys = {key.replace("__", "."): value for key, value in values.items()}
    return trace_memory({**JOB, **keys}, model_args=SMALL, world_size=world_size, rank=rank, layers=layers)


once = functools.cache(trace)
"""For tests that look at the same trace."""


def check(result: TraceResult) -> None:
    assert set(result.components) <= set(COMPONENTS)
    assert sum(result.components.values()) == result.active_bytes == max(result.phases.values())
    assert result.phases[result.phase] == result.active_bytes
    assert result.reserved_bytes is not None and result.reserved_bytes >= result.active_bytes
    assert result.assumptions


def test_one_gpu_is_the_closed_form() -> None:
    """fp32 states, autocast: the sum that describes the H200 rows, to within rounding to 512 bytes."""
    result = once()
    check(result)
    assert result.phase == "loss_backward"
    assert result.components["parameters"] == pytest.approx(4 * PARAMETERS, rel=2e-3)
    assert result.components["optimizer"] == pytest.approx(8 * PARAMETERS, rel=2e-3)
    block = 4 * TOKENS * DIM + 2 * TOKENS * (2 * DIM + KV_WIDTH + FFN) + 4 * TOKENS * HEADS + 2 * TOKENS * DIM
    tail = 4 * TOKENS * DIM + 2 * TOKENS * DIM + 4 * TOKENS
    assert result.components["activations"] == pytest.approx(LAYERS * block + tail, rel=2e-3)
    assert result.components["logits_loss"] == pytest.approx(12 * TOKENS * VOCAB, rel=2e-3)


def test_float8_linears_cast_their_inputs_under_autocast() -> None:
    """An eager block without AC keeps with float8 what it keeps without, but for autocast's copies of the weights:
    so on an H200, 1.81 GiB in each of six pairs of runs (tests/data/tables/llama3_1b_one_gpu.jsonl)."""
    none = {"activation_checkpoint__mode": "none"}
    converters = {"model__converters": ["quantize.linear.float8"]}
    float8 = trace(**none, **converters, quantize__linear__float8__filter_fqns=["output"])
    plain = trace(**none)
    weights = 2 * LAYERS * (BLOCK - 2 * DIM)
    assert plain.active_bytes - float8.active_bytes == pytest.approx(weights, rel=0.01)


def test_same_request_same_answer() -> None:
    first, second = once(2, compile__enable=True), trace(2, compile__enable=True)
    check(first)
    assert first.active_bytes == second.active_bytes
    assert first.reserved_bytes == second.reserved_bytes
    assert first.timeline == second.timeline


def test_second_step_repeats_itself() -> None:
    """What lives when the second step begins lives when it ends, but for its batch and its loss."""
    result = once(2)
    batch = 2 * 8 * TOKENS
    assert 0 <= result.phases["step_end"] - result.phases["zero_grad"] - batch <= 1024
    # after the batch, only the count of valid tokens is still to go
    assert result.phases["zero_grad"] - result.timeline[-1].active_bytes == 512


@pytest.mark.parametrize("compile_", [False, True])
def test_extrapolation_is_the_full_trace(compile_: bool) -> None:
    full = once(2, compile__enable=True) if compile_ else once(2)
    short = trace(2, layers=2, compile__enable=compile_)
    check(full)
    assert short.traced_layers == (4, 5)
    assert short.reserved_bytes is None
    assert short.active_bytes == full.active_bytes
    assert short.phase == full.phase
    assert short.components == full.components


def test_pipeline_ranks_hold_their_stages() -> None:
    pipeline = {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "1F1B",
        "training__dtype": "bfloat16",
    }
    first, last = (trace(2, rank=rank, **pipeline) for rank in (0, 1))
    for result in (first, last):
        check(result)
    assert (first.stages, last.stages) == ((0,), (1,))
    assert first.components.get("logits_loss", 0) == 0
    assert last.components["logits_loss"] > 0
    held = first.components["parameters"] + last.components["parameters"]
    assert held == pytest.approx(2 * PARAMETERS, rel=2e-3)


def test_overlapped_forwards_leave_their_logits() -> None:
    """torchtitan's overlap callback saves the last stage's outputs; torch's own schedule does not."""
    pipeline = {
        "training__local_batch_size": 8,
        "training__dtype": "bfloat16",
        "activation_checkpoint__mode": "full",
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_schedule": "DualPipeV",
    }
    overlap = "parallelism__pipeline_parallel_expert_parallel_overlap"
    kept, freed = (trace(2, **pipeline, **{overlap: value}) for value in (True, False))
    assert kept.stages == freed.stages == (0, 3)
    logits = 2 * SEQ * VOCAB
    # six of the eight microbatches; they stay until the next step begins
    assert kept.phases["optimizer"] - freed.phases["optimizer"] == 6 * logits
    assert kept.active_bytes > freed.active_bytes


def test_tensor_parallel_without_mixed_precision_keeps_scores() -> None:
    result = trace(2, parallelism__tensor_parallel_degree=2)
    check(result)
    assert any("MATH" in sentence for sentence in result.assumptions)
    assert result.phases["backward"] > 4 * BATCH * HEADS // 2 * SEQ * SEQ


def test_replicas_hold_buckets() -> None:
    ddp = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
    alone, replicated = once(), trace(2, **ddp)
    check(replicated)
    assert replicated.active_bytes - alone.active_bytes == pytest.approx(4 * PARAMETERS, rel=1e-3)


def test_experts_get_the_same_number_of_tokens() -> None:
    values = {**JOB, "model.name": "deepseek_v3", "model.flavor": "debugmodel", "training.seq_len": 512}
    results = [
        trace_memory({**values, "parallelism.expert_parallel_degree": degree}, model_args={}, world_size=2)
        for degree in (1, 2)
    ]
    for result in results:
        check(result)
        assert any("routed evenly" in sentence for sentence in result.assumptions)
    # FSDP over two ranks and experts over two ranks both halve the states
    parameters = [result.components["parameters"] for result in results]
    assert parameters[0] == pytest.approx(parameters[1], rel=0.02)


@pytest.mark.parametrize("world_size", [4, 8])
def test_experts_that_are_sharded_too_are_gathered_while_selective_checkpointing_recomputes(
    world_size,
) -> None:
    """Which torch 2.13 itself refuses; torch 2.11 trains it."""
    values = {**JOB, "model.name": "deepseek_v3", "model.flavor": "debugmodel", "training.seq_len": 512}
    values |= {"parallelism.expert_parallel_degree": 2, "activation_checkpoint.mode": "selective"}
    values |= {"activation_checkpoint.selective_ac_option": "op"}
    result = trace_memory(values, model_args={}, world_size=world_size)
    check(result)
    full = trace_memory(
        {**values, "activation_checkpoint.mode": "full"}, model_args={}, world_size=world_size
    )
    assert result.components["parameters"] == full.components["parameters"]
    assert result.active_bytes > full.active_bytes


def test_tied_embeddings_are_one_parameter_under_fsdp() -> None:
    """As torch 2.11 trains them, also where the tracing torch refuses to shard a shared parameter."""
    dense = {**SMALL, "head_dim": 32, "hidden_dim": FFN, "n_layers": 2, "qk_norm": True}
    del dense["multiple_of"]
    apart, tied = (
        trace_memory(
            {**JOB, "model.name": "qwen3"}, model_args={**dense, "enable_weight_tying": tie}, world_size=2
        )
        for tie in (False, True)
    )
    check(tied)
    table = 4 * VOCAB * DIM // 2
    for component in ("parameters", "optimizer"):
        moments = 2 if component == "optimizer" else 1
        fewer = apart.components[component] - tied.components[component]
        assert fewer == pytest.approx(moments * table, rel=1e-3)


def test_selective_checkpointing_keeps_what_an_eager_flex_kernel_returns() -> None:
    shallow = {**SMALL, "n_layers": 2}
    fused, flex = (
        trace_memory(JOB, model_args={**shallow, **attention}, world_size=1)
        for attention in ({}, {"attn_type": "flex", "attn_mask_type": "causal"})
    )
    check(flex)
    assert flex.phase == fused.phase == "loss_backward"
    queries_and_keys = 2 * TOKENS * (DIM + KV_WIDTH)
    more = flex.components["activations"] - fused.components["activations"]
    assert more == pytest.approx(2 * queries_and_keys, rel=1e-3)


def test_errors_are_torchtitans_own() -> None:
    with pytest.raises(TraceError, match="Invalid parallel dims"):
        trace(3, parallelism__tensor_parallel_degree=2, parallelism__data_parallel_shard_degree=2)


def test_unknown_flavor() -> None:
    with pytest.raises(TraceError, match="has no flavor 'no such'"):
        trace_memory({**JOB, "model.flavor": "no such"}, model_args={}, world_size=1)
