"""Traces as estimates. The tracing process itself is replaced, but for the tests marked torchtitan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import Compilation, ParallelDims, Settings
from titan_tune.errors import InputError
from titan_tune.estimate import estimate_memory, traced
from titan_tune.estimate.items import COMPONENTS
from titan_tune.estimate.traced import trace_margins, traced_memory, traced_pipeline_ranks
from titan_tune.trace import TraceError, TraceResult
from titan_tune.trace.events import Point
from titan_tune.units import GIB


def job(*, pp: int = 1, shard: int = 2, gpu: str = "h100-80gb") -> Settings:
    dims = ParallelDims(dp_shard=shard, pp=pp)
    gpus = dims.world_size
    return Settings(
        model=model_spec("llama3", "8B"),
        cluster=ClusterSpec(gpu=gpu_spec(gpu), num_nodes=max(1, gpus // 8), gpus_per_node=min(8, gpus)),
        dims=dims,
        local_batch_size=pp,
        global_batch_size=pp * shard,
        seq_len=4096,
        compile=Compilation(model=True, loss=True),
    )


def result(rank: int, active: int, phase: str = "loss_backward") -> TraceResult:
    return TraceResult(
        active_bytes=active,
        phase=phase,
        components={"parameters": active // 2, "activations": active - active // 2},
        phases={"forward": active - 1, phase: active},
        reserved_bytes=active + GIB,
        allocator="expandable",
        timeline=(Point(0, "zero_grad", 1), Point(1, phase, active)),
        rank=rank,
        stages=(rank,),
        traced_layers=(32,),
        num_events=2,
        seconds=1.0,
        torch_version="2.13.0",
        assumptions=("tokens are routed evenly",),
    )


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that were traced; a rank has (40 - rank) GiB."""
    asked: list[int] = []

    def fake(
        values: Mapping[str, Any], *, model_args: object, world_size: int, rank: int, allocator: str
    ) -> TraceResult:
        asked.append(rank)
        return replace(result(rank, (40 - rank) * GIB), allocator=allocator)

    monkeypatch.setattr(traced, "trace_memory", fake)
    return asked


def test_one_trace_where_all_ranks_are_alike(traces: list[int]) -> None:
    memory = traced_memory(job(), {}, {}).memory
    assert traces == [0]
    assert memory.method == "trace"
    assert memory.active_bytes == 40 * GIB
    assert memory.reserved_bytes == 41 * GIB
    assert memory.device_bytes == memory.reserved_bytes + estimate_memory(job()).outside_bytes
    assert set(memory.components) == set(COMPONENTS)
    assert sum(memory.components.values()) == memory.active_bytes
    assert memory.active_interval[0] < memory.active_bytes < memory.active_interval[1]
    assert memory.verdict is Verdict.FITS
    assert "tokens are routed evenly" in memory.assumptions


@pytest.mark.parametrize(
    ("gpu", "segments"), [("h100-80gb", "expandable"), ("mi300x", "classic"), ("mi355x", "classic")]
)
def test_the_allocator_is_that_of_the_gpus_vendor(traces: list[int], gpu: str, segments: str) -> None:
    found = traced_memory(job(gpu=gpu), {}, {})
    assert [trace.allocator for trace in found.results] == [segments]
    assert any(segments in sentence for sentence in found.memory.assumptions)


def test_every_rank_of_a_short_pipeline_is_traced(traces: list[int]) -> None:
    told: list[tuple[int, int]] = []
    found = traced_memory(job(pp=4), {}, {}, on_rank=lambda rank, ranks: told.append((rank, ranks)))
    # the pipeline is the outermost dimension: two ranks a stage
    assert traces == [0, 2, 4, 6]
    assert told == [(rank, 4) for rank in range(4)]
    assert [stage.stage for stage in found.memory.stages] == [0, 1, 2, 3]
    assert found.memory.worst_stage == 0


def test_of_a_long_pipeline_the_ends_and_the_formulas_worst(traces: list[int]) -> None:
    settings = job(pp=8)
    ranks = traced_pipeline_ranks(settings)
    assert {0, 7, estimate_memory(settings).worst_stage} == set(ranks)
    memory = traced_memory(settings, {}, {}).memory
    assert [stage.stage for stage in memory.stages] == list(ranks)
    assert any("the others are not in the figures" in sentence for sentence in memory.assumptions)


@pytest.mark.parametrize(("capacity", "verdict"), [(41, "does_not_fit"), (42, "pressure"), (60, "fits")])
def test_verdict_as_for_the_formula(traces: list[int], capacity: float, verdict: str) -> None:
    settings = job()
    gpu = settings.cluster.gpu.model_copy(update={"memory_gib": capacity})
    settings = replace(settings, cluster=settings.cluster.model_copy(update={"gpu": gpu}))
    assert traced_memory(settings, {}, {}).memory.verdict == verdict


def test_what_torchtitan_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> TraceResult:
        raise TraceError("AssertionError: Invalid parallel dims")

    monkeypatch.setattr(traced, "trace_memory", refuse)
    with pytest.raises(InputError, match="--method trace: AssertionError: Invalid parallel dims"):
        traced_memory(job(), {}, {})


def test_a_cpu_has_no_gpu_memory(traces: list[int]) -> None:
    gpu = gpu_spec("h200").model_copy(update={"is_cpu": True})
    settings = job()
    settings = replace(settings, cluster=settings.cluster.model_copy(update={"gpu": gpu}))
    with pytest.raises(InputError, match="--gpu"):
        traced_memory(settings, {}, {})
    assert traces == []


def test_margins_widen_with_what_was_not_measured() -> None:
    plain = trace_margins(job(), "loss_backward")
    block = trace_margins(job(), "backward")
    pipeline = trace_margins(job(pp=2), "backward")
    assert plain[0] <= block[0] < pipeline[0]
    assert plain[1] < block[1] < pipeline[1]


def test_a_compiled_stage_has_twice_its_residual_below() -> None:
    """Interleaved1F1B on an H200: 1.77 % below its trace."""
    below, _ = trace_margins(job(pp=2), "backward")
    assert 2 * 0.0177 <= below <= 2.1 * 0.0177
    assert trace_margins(job(pp=2), "loss_backward")[0] == pytest.approx(0.01)


@pytest.mark.torchtitan
def test_the_real_thing_agrees_with_the_formula() -> None:
    from titan_tune.titan.job import job_from_text
    from titan_tune.titan.settings import settings_from

    text = (
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\nlocal_batch_size = 4\nseq_len = 2048\n'
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n'
    )
    torchtitan_job = job_from_text(text, name="job")
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=2)
    settings = settings_from(torchtitan_job.resolved(), torchtitan_job.model, cluster)
    memory = traced_memory(settings, torchtitan_job.resolved(), torchtitan_job.model_args).memory
    assert memory.active_bytes == pytest.approx(estimate_memory(settings).active_bytes, rel=0.03)
    assert memory.reserved_bytes >= memory.active_bytes
