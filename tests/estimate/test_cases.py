"""What is covered, verdicts, and single terms whose value is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from h200 import rows

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    CompileMode,
    ParallelDims,
    Pipeline,
    Settings,
)
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.estimate.activations import saved_block_bytes
from titan_tune.estimate.parameters import ParamPath, Recompute, param_path, shapes_of
from titan_tune.estimate.verdict import verdict_of
from titan_tune.units import GIB


def job(row_id: str, **changes: Any) -> Settings:
    row = next(row for row in rows() if row.id == row_id)
    return replace(row.settings, **changes)


def phase(settings: Settings, name: str) -> dict[str, float]:
    return dict(next(p for p in estimate_memory(settings).stages[0].phases if p.name == name).items)


ONE_GPU = "1B-b4-s4096-op-c-bf16"
FSDP = "1B-b4-s4096-op-c-bf16-fsdp2"
TP = "1B-b4-s4096-op-c-bf16-tp2"


def test_ddp_over_tensor_parallel_is_not_covered() -> None:
    cluster = ClusterSpec(gpu=job(ONE_GPU).cluster.gpu, gpus_per_node=4)
    with pytest.raises(NotCoveredError, match="data_parallel_replicate_degree") as caught:
        estimate_memory(job(ONE_GPU, dims=ParallelDims(dp_replicate=2, tp=2), cluster=cluster))
    assert "\n" not in str(caught.value)


def test_paths() -> None:
    assert param_path(job(ONE_GPU)) is ParamPath.AUTOCAST
    assert param_path(job(ONE_GPU, mixed_precision_param="float32")) is ParamPath.PLAIN
    assert param_path(job(FSDP)) is ParamPath.FSDP
    assert param_path(job(FSDP, dims=ParallelDims(cp=2))) is ParamPath.FSDP
    assert param_path(job(TP)) is ParamPath.PLAIN


@pytest.mark.parametrize(
    ("active", "reserved", "verdict"),
    [
        ((60, 60), 70, Verdict.FITS),
        ((60, 60), 79, Verdict.PRESSURE),
        ((77, 79), 77, Verdict.PRESSURE),
        ((79, 79), 79, Verdict.DOES_NOT_FIT),
    ],
)
def test_verdict(active: tuple[float, float], reserved: float, verdict: Verdict) -> None:
    interval = (active[0] * GIB, active[1] * GIB)
    assert verdict_of(interval, reserved * GIB, 2 * GIB, 80 * GIB) is verdict


def test_fp32_tensor_parallel_pays_for_attention_scores() -> None:
    fp32, bf16 = shapes_of(job(TP)), shapes_of(job(TP, dtype="bfloat16"))
    assert fp32.math_attention
    assert not bf16.math_attention
    assert phase(job(TP), "last_block_backward")["attention_scores_backward"] == 2 * fp32.score_bytes
    assert fp32.score_bytes == 4 * 4 * 16 * 4096**2


def test_gradients_of_earlier_microbatches_are_there_in_loss_backward() -> None:
    for row_id in (ONE_GPU, FSDP, TP):
        once = job(row_id)
        twice = replace(once, global_batch_size=2 * once.global_batch_size)
        assert phase(once, "loss_backward").get("gradients", 0.0) == 0.0
        assert phase(twice, "loss_backward")["gradients"] == phase(twice, "optimizer")["gradients"] > 0


def test_never_resharding_keeps_the_gathered_model() -> None:
    # measured on H200: +6.0 GiB for the 3B on two GPUs
    before = job("3B-b2-s4096-op-c-bf16-fsdp2")
    after = replace(before, reshard_after_forward="never")
    assert (
        estimate_memory(after).active_bytes - estimate_memory(before).active_bytes
    ) / GIB == pytest.approx(6.0, abs=0.1)


def test_memory_budget_quarter_is_what_was_measured() -> None:
    # H200, 1B, 16,384 tokens on one GPU: 29.8 GiB active
    settings = job("1B-b4-s4096-mb50-c-bf16")
    quarter = replace(settings, ac=replace(settings.ac, memory_budget=0.25))
    assert estimate_memory(quarter).active_bytes / GIB == pytest.approx(29.8, abs=0.05)


def test_every_block_checkpointed_is_full() -> None:
    settings = job(ONE_GPU, ac=ActivationCheckpointing(every=1))
    shapes = shapes_of(settings)
    loss = phase(settings, "loss_backward")
    assert loss["activations"] == 16 * saved_block_bytes(shapes, Recompute.FULL)


def test_turning_loss_parallel_off_costs_whole_logits() -> None:
    on = job(TP, compile=Compilation(model=True, loss=False))
    off = replace(on, loss_parallel=False)
    tokens, vocab = 4 * 4096, 128256
    assert phase(on, "loss_backward")["logits_loss"] == 8 * tokens * vocab
    assert phase(off, "loss_backward")["logits_loss"] == 12 * tokens * vocab


def test_offload_leaves_no_states_on_the_gpu() -> None:
    items = phase(job(FSDP, cpu_offload=True), "optimizer")
    assert items.get("optimizer", 0.0) == 0.0
    assert items["gradients"] == 0.0
    assert estimate_memory(job(FSDP, cpu_offload=True)).active_bytes < estimate_memory(job(FSDP)).active_bytes


def test_pipeline_with_fsdp_accumulates_unsharded_fp32_gradients() -> None:
    cluster = ClusterSpec(gpu=job(ONE_GPU).cluster.gpu, gpus_per_node=4)
    settings = job(
        ONE_GPU,
        dims=ParallelDims(dp_shard=2, pp=2),
        cluster=cluster,
        local_batch_size=8,
        global_batch_size=16,
        pipeline=Pipeline(schedule="1F1B"),
    )
    first = estimate_memory(settings).stages[0]
    scatter = next(p for p in first.phases if p.name == "gradient_reduce_scatter")
    assert scatter.items["unsharded_gradients"] == 2 * scatter.items["gathered_kept"]
    assert scatter.items["parameters"] == scatter.items["unsharded_gradients"] / 2


def test_cpu_processes_have_no_cuda_context() -> None:
    settings = job(FSDP)
    cpu = settings.cluster.gpu.model_copy(update={"is_cpu": True, "compute_capability": None})
    on_cpu = replace(settings, cluster=settings.cluster.model_copy(update={"gpu": cpu}))
    assert estimate_memory(on_cpu).outside_bytes < 0.6 * GIB
    assert estimate_memory(on_cpu).reserved_bytes == estimate_memory(on_cpu).active_bytes
    assert estimate_memory(on_cpu).active_bytes < estimate_memory(settings).active_bytes


@pytest.mark.parametrize(
    ("batch", "ac", "active_gib", "reserved_gib"),
    [(16, AcMode.NONE, 103.48, 120.64), (4, AcMode.NONE, 47.20, 56.72), (4, AcMode.SELECTIVE, 34.25, 43.77)],
)
def test_cuda_graphs_reserve_a_pool_of_their_own(
    batch: int, ac: AcMode, active_gib: float, reserved_gib: float
) -> None:
    """Three 1B runs on one H200 with reduce-overhead (torch 2.11), within 12 %; active memory is not changed."""
    mode = Compilation(model=True, loss=True, mode=CompileMode.REDUCE_OVERHEAD)
    graphs = job(ONE_GPU, local_batch_size=batch, ac=ActivationCheckpointing(ac, every=0), compile=mode)
    default = replace(graphs, compile=replace(mode, mode=CompileMode.DEFAULT))
    with_graphs, without = estimate_memory(graphs), estimate_memory(default)
    assert with_graphs.active_bytes == without.active_bytes
    assert with_graphs.reserved_bytes > 1.1 * without.reserved_bytes
    assert with_graphs.reserved_bytes / with_graphs.active_bytes == pytest.approx(
        reserved_gib / active_gib, rel=0.12
    )
    assert estimate_step_time(graphs).seconds > estimate_step_time(default).seconds
