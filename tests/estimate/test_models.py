"""Model families other than Llama 3: parameter counts, physics, and traces of whole torchtitan steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from families import DENSE_QWEN, MODELS, job
from hypothesis import assume, given
from hypothesis import strategies as st
from test_properties import GPU, no_less

from titan_tune.catalog.loader import flavors, gpu_spec, model_names, model_spec, parameter_count
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    ParallelDims,
    Settings,
)
from titan_tune.estimate import estimate_memory, estimate_step_time
from titan_tune.estimate.items import COMPONENT_OF, COMPONENTS
from titan_tune.estimate.parameters import shapes_of
from titan_tune.titan.keys import defaults
from titan_tune.titan.settings import settings_from
from titan_tune.units import MIB


@pytest.mark.parametrize(("name", "flavor"), [(name, f) for name in model_names() for f in flavors(name)])
def test_parameters_are_those_of_torchtitans_model(name: str, flavor: str) -> None:
    cluster = ClusterSpec(gpu=gpu_spec("h200"))
    settings = settings_from(defaults(), model_spec(name, flavor, seq_len=2048), cluster)
    assert shapes_of(settings).local_params == parameter_count(name, flavor)


BF16 = {"training.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "mode", "compiled", "world_size", "degrees", "keys", "traced"),
    [
        ("qwen3", "full", True, 4, {}, {}, 133.6),
        ("qwen3", "none", True, 4, {}, {}, 208.2),
        ("qwen3", "none", False, 4, {}, {}, 286.2),
        ("qwen3", "none", False, 1, {}, {}, 406.5),
        ("qwen3", "none", False, 4, {"tp": 2}, {}, 207.8),
        ("qwen3", "op", True, 4, {}, {}, 155.8),
        ("qwen3", "op", True, 1, {}, {}, 223.9),
        ("qwen3", "op", True, 4, {"tp": 2}, {}, 148.1),
        ("qwen3", "op", False, 4, {}, {}, 224.8),
        ("qwen3", "op", False, 4, {"tp": 2}, {}, 179.7),
        ("qwen3 MoE", "full", True, 4, {}, {}, 156.3),
        ("qwen3 MoE", "full", False, 4, {}, {}, 202.0),
        ("qwen3 MoE", "full", False, 4, {}, {"training.global_batch_size": 32}, 212.2),
        ("qwen3 MoE", "none", True, 4, {}, {}, 228.3),
        ("qwen3 MoE", "none", True, 1, {}, {}, 337.3),
        ("qwen3 MoE", "none", False, 4, {}, {}, 299.5),
        ("qwen3 MoE", "none", False, 1, {}, {}, 451.1),
        ("qwen3 MoE", "none", False, 4, {"ep": 2}, {}, 299.2),
        ("qwen3 MoE", "none", False, 4, {"tp": 2}, {}, 235.0),
        ("qwen3 MoE", "op", True, 4, {}, {}, 158.9),
        ("qwen3 MoE", "op", False, 4, {}, {}, 215.7),
        ("deepseek_v3", "full", True, 4, {}, {}, 171.8),
        ("deepseek_v3", "full", False, 4, {}, {}, 203.3),
        ("deepseek_v3", "full", False, 2, {"tp": 2}, BF16, 166.3),
        ("deepseek_v3", "full", False, 4, {"ep": 4}, {}, 203.3),
        ("deepseek_v3", "full", False, 4, {"replicate": 2}, {}, 236.4),
        ("deepseek_v3", "full", False, 8, {"ep": 4}, {}, 186.8),
        ("deepseek_v3", "full", False, 8, {"tp": 2, "ep": 2, "etp": 2}, {}, 150.8),
        ("deepseek_v3", "full", False, 8, {"tp": 2, "ep": 4}, {}, 150.7),
        ("deepseek_v3", "full", False, 4, {"cp": 2}, {}, 154.7),
        ("deepseek_v3", "full", False, 4, {}, BF16, 186.7),
        ("deepseek_v3", "full", False, 4, {"ep": 2}, {}, 203.3),
        ("deepseek_v3", "full", False, 4, {"tp": 2}, {}, 167.6),
        ("deepseek_v3", "full", True, 1, {}, {}, 291.2),
        ("deepseek_v3", "op", True, 1, {}, {}, 300.8),
        ("qwen3 MoE", "op", True, 1, {}, {}, 268.6),
        ("llama4", "op", True, 1, {}, {}, 301.7),
        ("deepseek_v3", "none", True, 4, {}, {}, 256.5),
        ("deepseek_v3", "none", False, 4, {}, {}, 334.7),
        ("deepseek_v3", "none", False, 1, {}, {}, 482.4),
        ("deepseek_v3", "none", False, 4, {"tp": 2, "ep": 2, "etp": 2}, {}, 252.0),
        ("deepseek_v3", "none", False, 4, {"tp": 2, "ep": 4}, {}, 248.1),
        ("deepseek_v3", "none", False, 4, {"cp": 2}, {}, 220.5),
        ("deepseek_v3", "none", False, 4, {"ep": 2}, {}, 334.4),
        ("deepseek_v3", "none", False, 4, {"tp": 2}, {}, 252.1),
        ("deepseek_v3", "op", True, 4, {}, {}, 182.7),
        ("deepseek_v3", "op", False, 4, {}, {}, 241.3),
        ("deepseek_v3", "op", False, 4, {"cp": 2}, {}, 170.6),
        ("deepseek_v3", "op", False, 4, {"tp": 2}, {}, 194.1),
        ("deepseek_v3, query rank", "none", False, 4, {}, {}, 340.0),
        ("deepseek_v3, query rank", "op", True, 4, {}, {}, 181.5),
        ("deepseek_v3, query rank", "op", False, 4, {}, {}, 227.2),
        ("llama4", "full", True, 4, {}, {}, 164.7),
        ("llama4", "full", False, 4, {}, {}, 207.6),
        ("llama4", "full", False, 4, {"ep": 2}, {}, 207.6),
        ("llama4", "none", True, 4, {}, {}, 220.8),
        ("llama4", "none", False, 4, {}, {}, 298.7),
        ("llama4", "none", False, 1, {}, {}, 461.9),
        ("llama4", "none", False, 4, {"ep": 2}, {}, 298.4),
        ("llama4", "none", False, 4, {"tp": 2}, {}, 225.7),
        ("llama4", "op", True, 4, {}, {}, 170.7),
        ("llama4", "op", False, 4, {}, {}, 234.3),
        ("llama4", "op", False, 4, {"tp": 2}, {}, 192.2),
        ("gpt_oss", "full", False, 4, {}, {}, 190.4),
        ("gpt_oss", "full", False, 1, {}, {}, 253.4),
        ("gpt_oss", "full", False, 4, {"ep": 2}, {}, 190.5),
        ("gpt_oss", "full", False, 4, {"tp": 2}, {}, 154.1),
        ("gpt_oss", "none", False, 4, {}, {}, 308.1),
    ],
)
def test_layouts_that_traces_confirm(
    model: str,
    mode: str,
    compiled: bool,
    world_size: int,
    degrees: dict[str, int],
    keys: dict[str, Any],
    traced: float,
) -> None:
    # peak active MiB of one rank: torchtitan 0.2.2, torch 2.13 CPU with fake tensors
    settings = job(model, mode, compiled, world_size, keys, **degrees)
    assert estimate_memory(settings).active_bytes / MIB == pytest.approx(traced, rel=2e-3)


@st.composite
def settings_of_families(draw: st.DrawFn) -> Settings:
    model = draw(st.sampled_from(sorted(MODELS)))
    name, args = MODELS[model]
    dims = ParallelDims(
        dp_replicate=draw(st.sampled_from((1, 1, 2))),
        dp_shard=draw(st.sampled_from((1, 4, 8))),
        tp=draw(st.sampled_from((1, 2))),
        ep=draw(st.sampled_from((1, 1, 2, 4))),
    )
    assume(dims.ep == 1 or dims.fsdp_degree >= dims.ep)
    assume(dims.dp_replicate == 1 or dims.fsdp_degree > 1 or dims.tp == 1)
    dims = replace(dims, etp=draw(st.sampled_from((1, dims.tp))) if dims.ep > 1 else 1)
    batch = draw(st.sampled_from((1, 2, 8)))
    spec = model_spec(name, "drawn", model_args={**args, "n_layers": draw(st.integers(2, 24))}, seq_len=1024)
    return Settings(
        model=spec,
        cluster=ClusterSpec(gpu=GPU, gpus_per_node=dims.world_size),
        dims=dims,
        local_batch_size=batch,
        global_batch_size=batch * dims.dp_degree * draw(st.sampled_from((1, 4))),
        seq_len=draw(st.sampled_from((512, 4096))),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        reshard_after_forward=draw(st.sampled_from(("default", "always", "never"))),
        ac=ActivationCheckpointing(
            mode=draw(st.sampled_from((AcMode.NONE, AcMode.SELECTIVE, AcMode.FULL))),
            every=draw(st.sampled_from((0, 2, 3))),
        ),
        compile=Compilation(model=draw(st.booleans()), loss=draw(st.booleans())),
    )


def active(settings: Settings) -> float:
    return estimate_memory(settings).active_bytes


@given(settings_of_families())
def test_components_and_phases_add_up(job: Settings) -> None:
    estimate = estimate_memory(job)
    assert tuple(estimate.components) == COMPONENTS
    assert math.isclose(sum(estimate.components.values()), estimate.active_bytes, rel_tol=1e-9)
    for phase in estimate.stages[0].phases:
        assert set(phase.items) <= set(COMPONENT_OF)
        assert all(size >= 0 for size in phase.items.values()), phase
    assert estimate.active_bytes <= estimate.reserved_bytes
    assert any("routed evenly" in said for said in estimate.assumptions) == (job.model.moe is not None)


@given(settings_of_families())
def test_more_work_never_needs_less(job: Settings) -> None:
    before = active(job)
    larger = replace(
        job, local_batch_size=2 * job.local_batch_size, global_batch_size=2 * job.global_batch_size
    )
    deeper = replace(job, model=job.model.model_copy(update={"n_layers": job.model.n_layers + 2}))
    for more in (larger, replace(job, seq_len=2 * job.seq_len), deeper):
        assert no_less(active(more), before)


@given(settings_of_families())
def test_more_shards_never_cost_memory(job: Settings) -> None:
    assume(job.dims.fsdp_degree > 1)
    # more shards than experts pad the experts' first dimension
    assume(job.model.moe is None or job.dims.ep > 1 or 2 * job.dims.fsdp_degree <= 8)
    wider = replace(job.dims, dp_shard=2 * job.dims.dp_shard)
    assert no_less(active(job), active(replace(job, dims=wider, global_batch_size=2 * job.global_batch_size)))


def test_experts_that_fsdp_cannot_cut_evenly_are_padded() -> None:
    # 8 experts over 16 ranks: half of them hold one, the others none
    sixteen = shapes_of(job("qwen3 MoE", "full", False, 16, {}))
    eight = shapes_of(job("qwen3 MoE", "full", False, 8, {}))
    assert sixteen.moe is not None
    assert eight.moe is not None
    assert sixteen.moe.padded_expert_params == 2 * sixteen.moe.expert_params
    assert eight.moe.padded_expert_params == eight.moe.expert_params


def test_tied_embeddings_are_stored_once() -> None:
    tied = model_spec("qwen3", "traced", model_args={**DENSE_QWEN, "enable_weight_tying": True})
    apart = job("qwen3", "op", True, 1, {})
    together = replace(apart, model=tied)
    saved = shapes_of(apart).local_params - shapes_of(together).local_params
    assert saved == 4096 * 320
    assert active(apart) - active(together) == 12 * saved


@given(settings_of_families())
def test_step_time_parts_add_up(job: Settings) -> None:
    estimate = estimate_step_time(job)
    assert math.isclose(sum(estimate.components.values()), estimate.seconds, rel_tol=1e-9)
    assert all(seconds >= 0 for seconds in estimate.components.values())
    low, high = estimate.interval
    assert low < estimate.tokens_per_second_per_gpu < high


def test_only_active_experts_cost_time() -> None:
    few = job("qwen3 MoE", "full", False, 1, {})
    moe = few.model.moe
    assert moe is not None
    more = replace(
        few, model=few.model.model_copy(update={"moe": moe.model_copy(update={"num_experts": 64})})
    )
    wider = replace(few, model=few.model.model_copy(update={"moe": moe.model_copy(update={"top_k": 4})}))

    def matmul(settings: Settings) -> float:
        return estimate_step_time(settings).components["matmul"]

    router = 56 * 320
    per_block = 2 * 320 * (384 + 96) + 3 * 320 * 224 * 2 + 8 * 320
    assert matmul(more) / matmul(few) < 1 + 2 * router / per_block
    assert matmul(wider) / matmul(few) > 1.2
