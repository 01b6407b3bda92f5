"""The worst rank found by bounds is the worst of all ranks, to the last bit."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    ParallelDims,
    Pipeline,
    Settings,
)
from titan_tune.errors import InputError
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.items import by_component
from titan_tune.estimate.memory import LazyStages, worst_of

MODELS = (
    model_spec("llama3", "8B"),
    model_spec("llama3", "debugmodel"),
    model_spec("deepseek_v3", "16B"),
    model_spec("qwen3", "30B-A3B"),
    model_spec("gpt_oss", "20b"),
)
SCHEDULES = (
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
CHECKPOINTING = (
    ActivationCheckpointing(AcMode.NONE, 0),
    ActivationCheckpointing(AcMode.SELECTIVE, 0),
    ActivationCheckpointing(AcMode.SELECTIVE, 2),
    ActivationCheckpointing(AcMode.FULL, 0),
)


@st.composite
def pipelines(draw: st.DrawFn) -> Settings:
    batch = draw(st.sampled_from((4, 8, 16, 32)))
    shard, accumulate = draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 2)))
    compiled = draw(st.booleans())
    return Settings(
        model=draw(st.sampled_from(MODELS)),
        cluster=ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8, num_nodes=64),
        dims=ParallelDims(
            dp_shard=shard, tp=draw(st.sampled_from((1, 2))), pp=draw(st.sampled_from((2, 3, 4, 8)))
        ),
        local_batch_size=batch,
        global_batch_size=batch * shard * accumulate,
        seq_len=draw(st.sampled_from((2048, 8192))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        cpu_offload=draw(st.booleans()),
        ac=draw(st.sampled_from(CHECKPOINTING)),
        compile=Compilation(model=compiled, loss=compiled),
        pipeline=Pipeline(
            schedule=draw(st.sampled_from(SCHEDULES)),
            microbatch_size=draw(st.sampled_from((1, 2))),
            first_stage_less_layers=draw(st.integers(0, 2)),
            last_stage_less_layers=draw(st.integers(0, 2)),
        ),
    )


@given(pipelines())
@settings(deadline=None, max_examples=150)
def test_figures_are_those_of_all_ranks(job: Settings) -> None:
    try:
        memory = estimate_memory(job)
    except InputError:
        assume(False)
    every = worst_of(memory.stages)
    assert memory.worst_stage == every.stage
    assert memory.active_bytes == every.active_bytes
    assert memory.reserved_bytes == every.reserved_bytes
    assert memory.peak.name == every.peak.name
    assert dict(memory.components) == by_component(every.peak.items)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_says_what_it_holds(schedule: str) -> None:
    job = Settings(
        model=MODELS[0],
        cluster=ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8),
        dims=ParallelDims(dp_shard=2, pp=4),
        local_batch_size=8,
        global_batch_size=16,
        seq_len=4096,
        pipeline=Pipeline(schedule=schedule),
    )
    stages = estimate_memory(job).stages
    assert isinstance(stages, LazyStages)
    assert [stage.stage for stage in stages] == [0, 1, 2, 3]
    assert stages[1:3] == tuple(stages)[1:3]
    assert stages == tuple(stages)
    for stage in stages:
        assert (
            stage.active_bytes == max(phase.total_bytes for phase in stage.phases) == stage.peak.total_bytes
        )
        assert {"block_backward", "optimizer"} <= {phase.name for phase in stage.phases}


def test_ranks_between_the_ends_can_be_the_worst() -> None:
    """An early rank of uneven stages: the bound must not hide it."""
    job = Settings(
        model=MODELS[0],
        cluster=ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8),
        dims=ParallelDims(pp=8),
        local_batch_size=32,
        global_batch_size=32,
        seq_len=8192,
        ac=CHECKPOINTING[0],
        compile=Compilation(model=True, loss=True),
        pipeline=Pipeline(first_stage_less_layers=3, last_stage_less_layers=3),
    )
    memory = estimate_memory(job)
    assert 0 < memory.worst_stage < 7
    assert memory.worst_stage == worst_of(memory.stages).stage


BEFORE_BOUNDS = (
    ("llama3", "8B", "1F1B", (2, 1, 1), 1, 0, 88639275008.0, 93071238758.40001, "block_backward"),
    ("llama3", "8B", "GPipe", (4, 2, 8), 1, 3, 54311577600.0, 59081972633.600006, "loss_backward"),
    (
        "llama3",
        "70B",
        "Interleaved1F1B",
        (8, 8, 8),
        1,
        0,
        30957191168.0,
        34302374912.000004,
        "embedding_backward",
    ),
    ("llama3", "70B", "LoopedBFS", (4, 8, 2), 0, 1, 116721475584.0, 127897827328.0, "block_backward"),
    (
        "llama3",
        "8B",
        "InterleavedZeroBubble",
        (4, 1, 2),
        0,
        3,
        64879910912.0,
        74642843238.4,
        "loss_backward",
    ),
    ("llama3", "8B", "ZBVZeroBubble", (4, 2, 1), 3, 3, 47083700224.0, 49437885235.200005, "weight_backward"),
    ("llama3", "8B", "DualPipeV", (8, 1, 8), 1, 0, 33609713664.0, 38790271078.4, "loss_backward"),
    ("deepseek_v3", "16B", "1F1B", (4, 1, 8), 1, 1, 36698091776.0, 43154206988.8, "block_backward"),
    (
        "qwen3",
        "30B-A3B",
        "Interleaved1F1B",
        (4, 1, 8),
        3,
        1,
        64917731712.0,
        74540573280.0,
        "block_backward",
    ),
    ("gpt_oss", "20b", "1F1B", (2, 1, 8), 2, 1, 90178190464.0, 102067162611.2, "loss_backward"),
    ("llama3", "8B", "1F1B", (8, 1, 1), 2, 1, 105398960128.0, 110668908134.40001, "block_backward"),
)
"""Model, flavor, schedule, (pp, tp, dp_shard), checkpointing; worst rank, active and reserved bytes and the peak as
computed without bounds, rank by rank."""


@pytest.mark.parametrize("case", BEFORE_BOUNDS, ids=lambda case: " ".join(map(str, case[:4])))
def test_bounds_changed_no_figure(
    case: tuple[str, str, str, tuple[int, int, int], int, int, float, float, str],
) -> None:
    name, flavor, schedule, (pp, tp, shard), ac, *expected = case
    job = Settings(
        model=model_spec(name, flavor),
        cluster=ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8, num_nodes=64),
        dims=ParallelDims(dp_shard=shard, tp=tp, pp=pp),
        local_batch_size=16,
        global_batch_size=16 * shard,
        seq_len=4096,
        ac=CHECKPOINTING[ac],
        pipeline=Pipeline(schedule=schedule),
    )
    memory = estimate_memory(job)
    found = [memory.worst_stage, memory.active_bytes, memory.reserved_bytes, memory.peak.name]
    assert found == expected
