"""Physics that must hold for any job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_tune.domain.cluster import ClusterSpec, GpuSpec
from titan_tune.domain.model import ModelSpec
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    Float8,
    ParallelDims,
    Pipeline,
    Settings,
)
from titan_tune.errors import InputError
from titan_tune.estimate import estimate_memory, estimate_step_time
from titan_tune.estimate.activations import saved_block_bytes
from titan_tune.estimate.items import COMPONENT_OF, COMPONENTS
from titan_tune.estimate.parameters import Recompute, shapes_of

GPU = GpuSpec(
    name="h200",
    memory_gib=139.8,
    bf16_tflops=989.0,
    float8_tflops=1979.0,
    memory_gb_per_s=4800.0,
    link_gb_per_s=450.0,
    compute_capability=(9, 0),
)
SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip


def model(layers: int = 16, vocab: int = 128256, dim: int = 2048) -> ModelSpec:
    return ModelSpec(
        name="llama3",
        flavor="test",
        dim=dim,
        n_layers=layers,
        n_heads=dim // 64,
        n_kv_heads=8,
        head_dim=64,
        ffn_hidden_dim=4 * dim,
        vocab_size=vocab,
    )


PIPELINE_DEGREES = st.sampled_from((1, 2, 4))


@st.composite
def settings(draw: st.DrawFn, *, pp: st.SearchStrategy[int] = PIPELINE_DEGREES) -> Settings:
    dims = ParallelDims(
        dp_replicate=draw(st.sampled_from((1, 1, 2))),
        dp_shard=draw(st.sampled_from((1, 2, 8))),
        cp=draw(st.sampled_from((1, 1, 2))),
        tp=draw(st.sampled_from((1, 2, 4))),
        pp=draw(pp),
    )
    assume(dims.dp_replicate == 1 or dims.fsdp_degree > 1 or (dims.tp == 1 and dims.pp == 1))
    batch = draw(st.sampled_from((1, 2, 8)))
    batch = max(batch, 2 * dims.pp if dims.pp > 1 else 1)
    mode = draw(st.sampled_from(AcMode))
    option = draw(st.sampled_from((0, 1, 2, 3)))
    compiled = draw(st.booleans())
    recipe = draw(st.sampled_from((None, Float8(), Float8(recipe="rowwise"))))
    return Settings(
        model=model(draw(st.integers(4, 40)), draw(st.sampled_from((2048, 32000, 128256)))),
        cluster=ClusterSpec(gpu=GPU, gpus_per_node=dims.world_size),
        dims=dims,
        local_batch_size=batch,
        global_batch_size=batch * dims.dp_degree * draw(st.sampled_from((1, 4))),
        seq_len=draw(st.sampled_from((512, 4096, 8192))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        mixed_precision_param=draw(st.sampled_from(("bfloat16", "bfloat16", "float32"))),
        reshard_after_forward=draw(st.sampled_from(("default", "always", "never"))),
        cpu_offload=dims.fsdp_degree > 1 and draw(st.booleans()),
        ac=ActivationCheckpointing(mode=mode, every=option, memory_budget=draw(st.floats(0, 1))),
        compile=Compilation(model=compiled or mode is AcMode.MEMORY_BUDGET, loss=draw(st.booleans())),
        float8=recipe,
        loss_parallel=draw(st.booleans()),
        pipeline=Pipeline(schedule=draw(st.sampled_from(SCHEDULES))),
    )


def active(job: Settings) -> float:
    """Peak active bytes, skipping jobs that a pipeline cannot cut."""
    try:
        return estimate_memory(job).active_bytes
    except InputError:
        assume(False)
        raise AssertionError from None


def no_less(after: float, before: float) -> bool:
    return after >= before * (1 - 1e-12)


@given(settings())
def test_components_and_phases_add_up(job: Settings) -> None:
    active(job)
    estimate = estimate_memory(job)
    assert tuple(estimate.components) == COMPONENTS
    assert math.isclose(sum(estimate.components.values()), estimate.active_bytes, rel_tol=1e-9)
    for stage in estimate.stages:
        assert stage.active_bytes == max(phase.total_bytes for phase in stage.phases)
        assert stage.active_bytes <= stage.reserved_bytes
        for phase in stage.phases:
            assert set(phase.items) <= set(COMPONENT_OF)
            assert all(size >= 0 for size in phase.items.values()), phase
    assert estimate.active_bytes == max(stage.active_bytes for stage in estimate.stages)
    assert estimate.active_interval[0] < estimate.active_bytes < estimate.active_interval[1]
    assert estimate.device_bytes == estimate.reserved_bytes + estimate.outside_bytes


@given(settings(), st.sampled_from((2, 4)))
def test_more_shards_never_cost_memory(job: Settings, factor: int) -> None:
    assume(job.dims.fsdp_degree > 1)
    wider = replace(job.dims, dp_shard=job.dims.dp_shard * factor)
    batch = job.global_batch_size * factor
    assert no_less(active(job), active(replace(job, dims=wider, global_batch_size=batch)))


@given(settings())
def test_a_longer_sequence_never_needs_less(job: Settings) -> None:
    assert no_less(active(replace(job, seq_len=2 * job.seq_len)), active(job))


@given(settings())
def test_a_larger_batch_never_needs_less(job: Settings) -> None:
    larger = replace(
        job, local_batch_size=2 * job.local_batch_size, global_batch_size=2 * job.global_batch_size
    )
    assert no_less(active(larger), active(job))


@given(settings())
def test_more_layers_never_need_less(job: Settings) -> None:
    deeper = job.model.model_copy(update={"n_layers": job.model.n_layers + 2 * job.dims.pp * 2})
    assert no_less(active(replace(job, model=deeper)), active(job))


@given(settings())
def test_accumulation_never_needs_less(job: Settings) -> None:
    once = replace(job, global_batch_size=job.local_batch_size * job.dims.dp_degree)
    assert no_less(active(replace(once, global_batch_size=4 * once.global_batch_size)), active(once))


@given(settings(pp=st.just(1)))
def test_recomputing_more_never_saves_more(job: Settings) -> None:
    def saved(mode: AcMode) -> float:
        job_ = replace(job, ac=ActivationCheckpointing(mode=mode, every=0))
        phases = estimate_memory(job_).stages[0].phases
        loss = next(phase for phase in phases if phase.name == "loss_backward")
        return loss.items["activations"] + loss.items["attention_scores"]

    assume(job.float8 is None)
    assert saved(AcMode.FULL) <= saved(AcMode.SELECTIVE) <= saved(AcMode.NONE)


@given(settings(pp=st.just(1)), st.floats(0, 1), st.floats(0, 1))
def test_memory_budget_lies_between_full_and_none_and_grows(job: Settings, a: float, b: float) -> None:
    def saved(budget: float) -> float:
        ac = ActivationCheckpointing(mode=AcMode.MEMORY_BUDGET, memory_budget=budget)
        compiled = replace(job, ac=ac, compile=Compilation(model=True, loss=True))
        return saved_block_bytes(shapes_of(compiled), Recompute.BUDGET)

    assert saved(0) <= saved(min(a, b)) <= saved(max(a, b)) <= saved(1)


@given(settings())
def test_step_time_parts_add_up(job: Settings) -> None:
    active(job)
    estimate = estimate_step_time(job)
    assert math.isclose(sum(estimate.components.values()), estimate.seconds, rel_tol=1e-9)
    assert all(seconds >= 0 for seconds in estimate.components.values())
    low, high = estimate.interval
    assert low < estimate.tokens_per_second_per_gpu < high
    slower = GPU.model_copy(update={"bf16_tflops": 100.0})
    other = replace(job, cluster=job.cluster.model_copy(update={"gpu": slower}))
    assert estimate_step_time(other).seconds > estimate.seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_of_all_stages_are_the_model(schedule: str) -> None:
    job = Settings(
        model=model(layers=30),
        cluster=ClusterSpec(gpu=GPU, gpus_per_node=4),
        dims=ParallelDims(pp=4),
        local_batch_size=16,
        global_batch_size=16,
        seq_len=512,
        dtype="bfloat16",
        pipeline=Pipeline(schedule=schedule),
    )
    per_block = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    whole = 30 * per_block + 2 * 128256 * 2048 + 2048
    held = sum(stage.peak.items["parameters"] for stage in estimate_memory(job).stages)
    assert held == 2 * whole
