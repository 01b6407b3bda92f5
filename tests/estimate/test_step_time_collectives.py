"""Collectives on an interconnect: the ring's bytes, nodes, and what overlap hides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_names, gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import ParallelDims
from titan_tune.errors import InputError
from titan_tune.estimate.collectives import (
    EXPOSURE,
    Cause,
    CollectiveRecord,
    Exposure,
    Interconnect,
    Link,
    Op,
    Rate,
    cause_of,
    collective_seconds,
    exposed_seconds,
    group_nodes,
    record_seconds,
)
from titan_tune.estimate.interconnect import interconnect_of, link, link_names, node_names, node_of
from titan_tune.estimate.step_time import CONSTANTS

GB = 1e9
NODES_OF_8 = Interconnect(
    name="test",
    gpus_per_node=8,
    intra=Link(Rate(400.0, 2e-6)),
    inter=Link(Rate(50.0, 5e-6)),
    launch_seconds=10e-6,
)
sizes = st.sampled_from((2, 4, 8, 16, 32, 64, 256))
strides = st.sampled_from((1, 2, 4, 8, 16))
ops = st.sampled_from(list(Op))


def test_ring_inside_a_node() -> None:
    moved = 7 / 8 * GB / 400e9
    steps = 7 * 2e-6
    assert collective_seconds(Op.ALL_GATHER, GB, 8, NODES_OF_8) == pytest.approx(10e-6 + steps + moved)
    assert collective_seconds(Op.ALL_REDUCE, GB, 8, NODES_OF_8) == pytest.approx(10e-6 + 2 * (steps + moved))
    assert collective_seconds(Op.ALL_TO_ALL, GB, 8, NODES_OF_8) == pytest.approx(10e-6 + steps + moved)
    assert collective_seconds(Op.SEND, GB, 8, NODES_OF_8) == pytest.approx(12e-6 + GB / 400e9)


def test_a_ring_across_nodes_enters_each_over_all_its_members_adapters() -> None:
    whole_nodes = collective_seconds(Op.REDUCE_SCATTER, GB, 16, NODES_OF_8)
    assert whole_nodes == pytest.approx(10e-6 + 14 * 2e-6 + 5e-6 + 15 / 16 * GB / 400e9)
    two_a_node = collective_seconds(Op.REDUCE_SCATTER, GB, 4, NODES_OF_8, stride=4)
    assert two_a_node == pytest.approx(10e-6 + 2 * 2e-6 + 5e-6 + 3 / 4 * GB / 100e9)
    one_a_node = collective_seconds(Op.REDUCE_SCATTER, GB, 4, NODES_OF_8, stride=8)
    assert one_a_node == pytest.approx(10e-6 + 3 * 5e-6 + 3 / 4 * GB / 50e9)


def test_all_to_all_across_nodes_waits_for_the_slower_kind_of_link() -> None:
    seconds = collective_seconds(Op.ALL_TO_ALL, GB, 16, NODES_OF_8)
    assert seconds == pytest.approx(10e-6 + 14 * 2e-6 + 5e-6 + 8 / 16 * GB / 50e9)


@pytest.mark.parametrize(
    ("size", "stride", "first", "expected"),
    [
        (8, 1, 0, (1, 8)),
        (4, 2, 8, (1, 4)),
        (4, 4, 0, (2, 2)),
        (16, 1, 0, (2, 8)),
        (32, 8, 5, (32, 1)),
        (2, 4, 6, (2, 2)),
    ],
)
def test_nodes_of_a_group(size: int, stride: int, first: int, expected: tuple[int, int]) -> None:
    assert group_nodes(size, stride, first, 8) == expected


def test_a_group_of_one_takes_no_time() -> None:
    assert collective_seconds(Op.ALL_REDUCE, GB, 1, NODES_OF_8) == 0.0


@given(ops, st.floats(0, 1e11), sizes, strides)
def test_never_faster_than_its_latency_and_grows_with_bytes(
    op: Op, size: float, group: int, stride: int
) -> None:
    seconds = collective_seconds(op, size, group, NODES_OF_8, stride=stride)
    assert seconds >= NODES_OF_8.launch_seconds
    assert collective_seconds(op, 2 * size + 1, group, NODES_OF_8, stride=stride) > seconds


@given(ops, st.floats(1e6, 1e11), sizes)
def test_spreading_a_group_over_nodes_never_makes_it_faster(op: Op, size: float, group: int) -> None:
    inside = collective_seconds(op, size, group, NODES_OF_8, stride=1)
    assert collective_seconds(op, size, group, NODES_OF_8, stride=8) >= inside


def test_a_measured_operation_has_its_own_rate() -> None:
    fast = Link(Rate(400.0, 2e-6), {Op.ALL_GATHER: Rate(300.0, 1e-6), Op.SEND: Rate(200.0, 0.0)})
    net = Interconnect("test", 8, intra=fast, inter=NODES_OF_8.inter, launch_seconds=0.0)
    assert collective_seconds(Op.ALL_GATHER, GB, 2, net) == pytest.approx(1e-6 + 0.5 * GB / 300e9)
    assert collective_seconds(Op.RECV, GB, 2, net) == pytest.approx(GB / 200e9)
    assert collective_seconds(Op.REDUCE_SCATTER, GB, 2, net) == pytest.approx(2e-6 + 0.5 * GB / 400e9)


def record(op: Op, cause: Cause, size: float, count: int = 1) -> CollectiveRecord:
    return CollectiveRecord(op=op, count=count, bytes=size, group_size=8, cause=cause)


def test_what_overlaps_is_exposed_in_part_and_the_rest_whole() -> None:
    records = [record(Op.ALL_GATHER, Cause.FSDP, GB, 3), record(Op.ALL_GATHER, Cause.TP, GB)]
    times = exposed_seconds(records, NODES_OF_8, 1.0, Exposure(overlapped=0.25, tensor_parallel=1.5))
    assert times.busy[Cause.FSDP] == pytest.approx(3 * collective_seconds(Op.ALL_GATHER, GB, 8, NODES_OF_8))
    assert times.exposed[Cause.FSDP] == pytest.approx(0.25 * times.busy[Cause.FSDP])
    assert times.exposed[Cause.TP] == pytest.approx(1.5 * times.busy[Cause.TP])
    assert times.exposed_seconds == pytest.approx(sum(times.exposed.values()))
    assert times.busy_seconds == pytest.approx(sum(times.busy.values()))


def test_compute_hides_no_more_than_it_lasts() -> None:
    records = [record(Op.ALL_GATHER, Cause.FSDP, 100 * GB), record(Op.ALL_REDUCE, Cause.HSDP, 100 * GB)]
    busy = sum(record_seconds(r, NODES_OF_8) for r in records)
    times = exposed_seconds(records, NODES_OF_8, 0.1 * busy, Exposure(overlapped=0.2))
    assert times.exposed_seconds == pytest.approx(0.9 * busy)


def test_sends_go_beside_receives() -> None:
    both = [record(Op.SEND, Cause.PP, GB, 4), record(Op.RECV, Cause.PP, GB, 4)]
    alone = exposed_seconds(both[:1], NODES_OF_8, 1.0)
    assert exposed_seconds(both, NODES_OF_8, 1.0) == alone
    assert alone.exposed[Cause.PP] > 0


def test_nothing_to_say_takes_no_time() -> None:
    assert exposed_seconds([], NODES_OF_8, 1.0).exposed_seconds == 0.0


@given(st.floats(0, 10), st.floats(0, 10))
def test_more_compute_never_exposes_more(shorter: float, added: float) -> None:
    records = [record(Op.ALL_GATHER, Cause.FSDP, GB, 500), record(Op.REDUCE_SCATTER, Cause.FSDP, 2 * GB, 500)]
    less = exposed_seconds(records, NODES_OF_8, shorter + added)
    more = exposed_seconds(records, NODES_OF_8, shorter)
    assert less.exposed_seconds <= more.exposed_seconds
    assert more.exposed_seconds <= max(1.0, EXPOSURE.overlapped) * more.busy_seconds


def test_dry_runs_and_the_formula_expose_alike() -> None:
    fitted = Exposure(CONSTANTS.overlapped_exposed, tensor_parallel=CONSTANTS.tensor_parallel_exposed)
    assert fitted == EXPOSURE


DIMS = ParallelDims(dp_replicate=2, dp_shard=4, cp=2, tp=2, pp=2, ep=4)


@pytest.mark.parametrize(
    ("op", "size", "stride", "expected"),
    [
        (Op.ALL_GATHER, 2, 1, Cause.TP),
        (Op.ALL_GATHER, 8, 2, Cause.FSDP),
        (Op.ALL_GATHER, 2, 2, Cause.CP),
        (Op.ALL_REDUCE, 2, 16, Cause.HSDP),
        (Op.ALL_TO_ALL, 4, 2, Cause.EP),
        (Op.REDUCE_SCATTER, 4, 4, Cause.FSDP),
        (Op.SEND, 2, 32, Cause.PP),
        (Op.ALL_REDUCE, 64, 1, Cause.OTHER),
    ],
)
def test_cause_by_the_shape_of_a_group(op: Op, size: int, stride: int, expected: Cause) -> None:
    assert cause_of(DIMS, op, size, stride) is expected


def test_cause_by_mesh_dimension_wins() -> None:
    assert cause_of(ParallelDims(cp=4), Op.ALL_GATHER, 4, 1) is Cause.FSDP
    assert cause_of(ParallelDims(cp=4), Op.ALL_GATHER, 4, 1, "cp") is Cause.CP
    assert cause_of(ParallelDims(dp_replicate=4), Op.ALL_REDUCE, 4, 1, "dp_replicate") is Cause.DDP


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_an_interconnect(name: str) -> None:
    gpu = gpu_spec(name)
    net = interconnect_of(ClusterSpec(gpu=gpu, num_nodes=2, gpus_per_node=8))
    assert 0 < net.intra.rate.gb_per_s < gpu.link_gb_per_s
    assert 0 < net.inter.rate.gb_per_s <= net.intra.rate.gb_per_s
    assert net.inter.rate.latency_seconds >= net.intra.rate.latency_seconds


def test_a_gpu_that_no_node_lists_gets_the_slowest() -> None:
    assert {node_of(name) for name in gpu_names()} <= set(node_names())
    assert node_of("a GPU of tomorrow") == "pcie-server"


def test_a_named_network_replaces_the_usual_one() -> None:
    cluster = ClusterSpec(gpu=gpu_spec("h200"), num_nodes=2, gpus_per_node=8)
    net = interconnect_of(cluster.model_copy(update={"interconnect": "efa-p5"}))
    assert net.inter.rate == link("efa-p5").rate
    assert net.intra == interconnect_of(cluster).intra
    assert "efa-p5" in net.name


@pytest.mark.parametrize(("name", "said"), [("efa-p6", "did you mean efa-p5"), ("nvlink4", "inside a node")])
def test_a_wrong_network_is_explained(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        interconnect_of(ClusterSpec(gpu=gpu_spec("h200"), interconnect=name))


def test_every_link_names_its_source() -> None:
    assert all(link(name, 100.0).source for name in link_names())
