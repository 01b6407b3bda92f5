"""From measurements to the model's rates, and what the model makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.calibrate.plan import CollectiveTask, MatmulTask, seconds_each, tasks
from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import (
    AttentionTime,
    Calibration,
    CollectiveTime,
    Copy,
    Fingerprint,
    Matmul,
)
from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.calibration import LinkRate, MeasuredRates
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import ParallelDims, Settings
from titan_tune.estimate import estimate_step_time
from titan_tune.estimate.collectives import NCCL_LAUNCH_SECONDS, Op, bus_bytes, ring_steps
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.units import MIB

EMPTY = Calibration(
    fingerprint=Fingerprint(gpu="test", num_gpus=4, driver="1", torch="2.11.0"),
    created="2026-01-01T00:00:00+00:00",
    seconds=1.0,
    world_size=4,
    backend="nccl",
)
RATES = MeasuredRates(
    matmul_tflops=100.0, copy_gb_per_s=1000.0, attention_tflops=50.0, source="calibrated here"
)


def test_nothing_measured_says_nothing() -> None:
    rates = rates_of(EMPTY)
    assert rates.matmul_tflops == rates.copy_gb_per_s == rates.attention_tflops == 0.0
    assert rates.links == ()
    assert rates.source == "calibrated on this machine, 2026-01-01"


def test_matmul_rate_is_of_the_most_tokens_and_of_its_kind() -> None:
    shapes = {"inputs": 1000, "outputs": 1000}
    calibration = EMPTY.model_copy(
        update={
            "matmuls": (
                Matmul(kind="bfloat16", tokens=10_000, **shapes, forward_seconds=1e-4, backward_seconds=5e-4),
                Matmul(kind="bfloat16", tokens=1_000, **shapes, forward_seconds=1.0, backward_seconds=1.0),
                Matmul(kind="float8_rowwise", tokens=10_000, **shapes, forward_seconds=5e-5),
            )
        }
    )
    rates = rates_of(calibration)
    assert rates.matmul_tflops == pytest.approx(6e10 / 6e-4 / 1e12)
    assert rates.float8_rowwise_tflops == pytest.approx(2e10 / 5e-5 / 1e12)
    assert rates.float8_tensorwise_tflops == 0.0


def test_attention_counts_the_causal_half_and_copies_both_ways() -> None:
    attention = AttentionTime(
        batch=2, heads=4, sequence=1024, head_dim=64, forward_seconds=1e-3, backward_seconds=2.5e-3
    )
    rates = rates_of(
        EMPTY.model_copy(
            update={
                "attention": (attention,),
                "copies": (Copy(bytes=10**9, seconds=1e-3), Copy(bytes=10**6, seconds=1.0)),
            }
        )
    )
    assert rates.attention_tflops == pytest.approx(2 * 2 * 4 * 64 * 1024**2 / 1e-3 / 1e12)
    assert rates.copy_gb_per_s == pytest.approx(2000.0)


@given(
    st.sampled_from([Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.SEND]),
    st.floats(1.0, 1000.0),
    st.floats(1e-6, 1e-3),
    st.sampled_from([2, 4, 8]),
)
def test_a_link_is_found_again(op: Op, gb_per_s: float, latency: float, ranks: int) -> None:
    times = tuple(
        CollectiveTime(
            op=op,
            bytes=size,
            group_size=ranks,
            seconds=NCCL_LAUNCH_SECONDS
            + ring_steps(op, ranks) * latency
            + bus_bytes(op, size, ranks) / gb_per_s / 1e9,
        )
        for size in (MIB, 16 * MIB, 256 * MIB)
    )
    (link,) = rates_of(EMPTY.model_copy(update={"collectives": times})).links
    assert link.gb_per_s == pytest.approx(gb_per_s, rel=1e-3)
    assert link.latency_seconds == pytest.approx(latency, rel=1e-3)


def test_one_size_or_noise_is_all_bandwidth() -> None:
    small = CollectiveTime(op=Op.ALL_REDUCE, bytes=MIB, group_size=2, seconds=2e-3)
    large = CollectiveTime(op=Op.ALL_REDUCE, bytes=64 * MIB, group_size=2, seconds=1e-3)
    for times in ((large,), (small, large)):
        (link,) = rates_of(EMPTY.model_copy(update={"collectives": times})).links
        assert link.gb_per_s == pytest.approx(64 * MIB / 1e-3 / 1e9)
        assert link.latency_seconds == 0.0


def job(gpu: str, rates: MeasuredRates | None, *, dims: ParallelDims | None = None) -> Settings:
    dims = dims or ParallelDims()
    cluster = ClusterSpec(gpu=gpu_spec(gpu), gpus_per_node=dims.world_size, rates=rates)
    return Settings(
        model=model_spec("llama3", "8B"),
        cluster=cluster,
        dims=dims,
        local_batch_size=1,
        global_batch_size=dims.dp_degree,
        seq_len=4096,
    )


def test_a_calibrated_gpu_is_as_fast_as_it_was_measured() -> None:
    slow = estimate_step_time(job("a100-80gb", RATES)).components
    fast = estimate_step_time(job("a100-80gb", replace(RATES, matmul_tflops=200.0))).components
    assert slow["matmul"] == pytest.approx(2 * fast["matmul"])
    assert slow["attention"] == fast["attention"]


def test_what_was_not_measured_keeps_the_data_sheet() -> None:
    known = estimate_step_time(job("a100-80gb", None)).components
    found = estimate_step_time(job("a100-80gb", replace(RATES, matmul_tflops=0.0))).components
    assert found["matmul"] == known["matmul"]
    assert found["elementwise"] != known["elementwise"]


def test_the_gpu_of_the_fit_takes_only_its_links() -> None:
    link = LinkRate("all_gather", 1.0, 0.0)
    dims = ParallelDims(dp_shard=8)
    known = estimate_step_time(job("h200", None, dims=dims)).components
    found = estimate_step_time(job("h200", replace(RATES, links=(link,)), dims=dims)).components
    assert found["communication"] > 10 * known["communication"]
    assert {**found, "communication": 0.0} == {**known, "communication": 0.0}


def test_unmeasured_collectives_go_at_the_slowest_measured_pace() -> None:
    links = (LinkRate("all_gather", 300.0, 1e-6), LinkRate("all_reduce", 200.0, 2e-6))
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8, rates=replace(RATES, links=links))
    net = interconnect_of(cluster)
    assert net.intra.of(Op.ALL_GATHER).gb_per_s == 300.0
    assert net.intra.of(Op.ALL_TO_ALL).gb_per_s == 200.0
    assert net.inter == interconnect_of(cluster.model_copy(update={"rates": None})).inter
    assert net.intra.source == "calibrated here"


def test_rates_are_no_part_of_what_a_cluster_is_recorded_as() -> None:
    plain = ClusterSpec(gpu=gpu_spec("h200"))
    assert plain.model_copy(update={"rates": RATES}).model_dump_json() == plain.model_dump_json()


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), 1), ((8, 9), 3), ((9, 0), 3), (None, 1)])
def test_float8_where_the_gpu_has_it(capability: tuple[int, int] | None, expected: int) -> None:
    found = tasks(device="cuda", world_size=2, capability=capability)
    kinds = {task.kind for task in found if isinstance(task, MatmulTask)} - {"float32"}
    assert len(kinds) == expected


def test_one_rank_has_nobody_to_talk_to() -> None:
    alone = tasks(device="cuda", world_size=1, capability=(9, 0))
    assert not [task for task in alone if isinstance(task, CollectiveTask)]
    together = tasks(device="cuda", world_size=2, capability=(9, 0))
    collectives = [task for task in together if isinstance(task, CollectiveTask)]
    assert {task.op for task in collectives} == {
        Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.SEND,
    }  # fmt: skip
    assert {task.bytes for task in collectives} == {MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB}
    assert set(alone) < set(together)


@given(st.floats(1, 3600), st.integers(1, 500))
def test_measurements_fit_the_time(seconds: float, count: int) -> None:
    assert 0 < seconds_each(seconds, count) * count <= seconds
