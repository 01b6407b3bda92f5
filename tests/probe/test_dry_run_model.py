import json
import math
from dataclasses import replace

import pytest
from dry_run_jobs import cluster_of, settings_of
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.probe import RankMemory, StepRecord
from titan_tune.estimate.collectives import Cause, CollectiveRecord, Op, collective_seconds
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.probe.dry_run_model import (
    DATA_PARALLEL_INTERVAL,
    EXPOSURE,
    MODEL_PARALLEL_INTERVAL,
    OTHER_GPU_INTERVAL,
    Chunk,
    RankRun,
    gpu_factor,
    makespan,
    predict,
    ranks_to_run,
    read_run,
)

PP4 = {"pipeline_parallel_degree": 4}
MEMORY = RankMemory(0, 0, 0, 0)


def pipeline_settings(schedule, *, pp=4, batch=8, layers=14, world_size=None):
    return settings_of(
        world_size or pp,
        batch=batch,
        layers=layers,
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        data_parallel_shard_degree=(world_size or pp) // pp,
    )


def even(settings, kinds, stages):
    return {(kind, stage): seconds for kind, seconds in kinds.items() for stage in range(stages)}


def test_without_a_pipeline_one_rank_stands_for_all():
    settings = settings_of(256, data_parallel_shard_degree=32, tensor_parallel_degree=8)
    assert ranks_to_run(settings) == ranks_to_run(settings, "all") == (0,)


def test_with_a_pipeline_one_rank_of_each_pipeline_rank():
    assert ranks_to_run(pipeline_settings("1F1B", world_size=32)) == (0, 8, 16, 24)
    long = pipeline_settings("1F1B", pp=16, batch=16, layers=46, world_size=32)
    assert ranks_to_run(long, "all") == tuple(range(0, 32, 2))
    # first, middle and last, and the formula's worst, which is one of them or one more
    assert {0, 16, 30} <= set(ranks_to_run(long)) and len(ranks_to_run(long)) <= 4


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_equal_stages_take_microbatches_and_the_ways_in_and_out(schedule, hop):
    settings = pipeline_settings(schedule)
    span = makespan(settings, even(settings, {"F": 1.0, "B": 2.0}, 4), hop)
    filled = (8 + 4 - 1) * 3.0
    assert span >= filled + 2 * 3 * hop - 1e-9
    if hop == 0.0:
        assert span == pytest.approx(filled)


def test_more_chunks_a_rank_and_split_backwards_wait_less():
    one = makespan(pipeline_settings("1F1B"), even(None, {"F": 1.0, "B": 2.0}, 4), 0.0)
    two = makespan(pipeline_settings("Interleaved1F1B"), even(None, {"F": 0.5, "B": 1.0}, 8), 0.0)
    split = makespan(pipeline_settings("ZBVZeroBubble"), even(None, {"F": 0.5, "I": 0.5, "W": 0.5}, 8), 0.0)
    busy = 8 * 3.0
    # the bubble of v chunks a rank is 1/v of 1F1B's (Narayanan et al. 2021)
    assert one - busy == pytest.approx(9.0)
    assert two - busy == pytest.approx(4.5)
    # 12 forwards, input and weight halves of 0.5 s are a rank's work; zero bubble by its name
    assert busy - 1e-9 <= split < two


SCHEDULES = st.sampled_from(
    ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)


@given(SCHEDULES, st.integers(0, 5), st.floats(0.1, 3.0), st.floats(0.0, 0.5))
def test_a_pipeline_takes_at_least_its_busiest_rank_and_longer_pieces_no_less(schedule, slow, factor, hop):
    settings = pipeline_settings(schedule)
    stages = 4 if schedule in ("1F1B", "GPipe") else 8
    kinds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    durations = even(settings, kinds, stages)
    durations |= {(kind, slow % stages): factor * kinds[kind] for kind in kinds}
    span = makespan(settings, durations, hop)
    work = [
        8 * (durations["F", stage] + durations["I", stage] + durations["W", stage]) for stage in range(stages)
    ]
    assert span >= max(work) - 1e-9
    longer = {key: seconds * 1.5 for key, seconds in durations.items()}
    assert makespan(settings, longer, hop) >= span - 1e-9


def run_of(seconds=1.0, collectives=(), chunks=(), rank=0):
    return RankRun(rank, replace(MEMORY, rank=rank), seconds, 3, tuple(collectives), tuple(chunks))


def test_tp_is_waited_for_and_fsdp_less():
    settings = settings_of(16, data_parallel_shard_degree=2, tensor_parallel_degree=8)
    links = interconnect_of(settings.cluster)
    fsdp = CollectiveRecord(Op.ALL_GATHER, 10, 1e8, 2, 8, 0, "forward", Cause.FSDP)
    tp = CollectiveRecord(Op.ALL_GATHER, 100, 1e8, 8, 1, 0, "forward", Cause.TP)
    alone = predict(settings, [run_of()], links)
    assert (alone.compute_seconds, alone.communication_seconds) == (1.0, 0.0)
    assert alone.step_seconds == 1.0 + alone.waiting_seconds > 1.0
    one_gpu = settings_of(1)
    assert predict(one_gpu, [run_of()], interconnect_of(one_gpu.cluster)).step_seconds == 1.0
    with_tp = predict(settings, [run_of(collectives=[tp])], links)
    with_fsdp = predict(settings, [run_of(collectives=[fsdp])], links)
    busy_tp = 100 * collective_seconds(Op.ALL_GATHER, 1e8, 8, links)
    busy_fsdp = 10 * collective_seconds(Op.ALL_GATHER, 1e8, 2, links, stride=8)
    assert with_tp.communication_seconds >= busy_tp
    assert with_fsdp.communication_seconds == pytest.approx(EXPOSURE.overlapped * busy_fsdp)
    assert EXPOSURE.overlapped < 1 <= with_tp.communication_seconds / busy_tp
    # but what computing is too short to hide is waited for
    hurried = predict(settings, [run_of(busy_fsdp / 10, collectives=[fsdp])], links)
    assert hurried.communication_seconds == pytest.approx(0.9 * busy_fsdp)
    assert with_tp.relative_interval == MODEL_PARALLEL_INTERVAL
    only_fsdp = settings_of(8, data_parallel_shard_degree=8)
    assert predict(only_fsdp, [run_of()], links).relative_interval == DATA_PARALLEL_INTERVAL


def test_a_pipeline_waits_for_its_slowest_rank():
    settings = pipeline_settings("1F1B", pp=2, layers=6)
    links = interconnect_of(settings.cluster)

    def run(rank, forward, backward):
        chunks = [Chunk(rank, "F", 8, forward), Chunk(rank, "B", 8, backward)]
        return run_of(8 * (forward + backward) + 0.5, chunks=chunks, rank=rank)

    found = predict(settings, [run(0, 1.0, 2.0), run(1, 1.5, 3.0)], links)
    assert found.compute_seconds == pytest.approx(8 * 4.5 + 0.5)
    # rank 1 works without a break from its first forward to its last backward
    assert found.bubble_seconds == pytest.approx(1.0 + 2.0)
    assert found.step_seconds == pytest.approx(
        found.compute_seconds + found.communication_seconds + found.bubble_seconds
    )


def test_a_stage_that_did_not_run_takes_as_long_as_its_neighbour():
    settings = pipeline_settings("1F1B", layers=14)  # 3, 4, 4 and 3 layers
    links = interconnect_of(settings.cluster)
    runs = [
        run_of(8 * 3 * size, chunks=[Chunk(rank, "F", 8, size), Chunk(rank, "B", 8, 2 * size)], rank=rank)
        for rank, size in ((0, 0.75), (1, 1.0), (3, 0.75))
    ]
    whole = [
        *runs[:2],
        replace(runs[1], rank=2, chunks=tuple(replace(c, stage=2) for c in runs[1].chunks)),
        runs[2],
    ]
    assert predict(settings, runs, links).step_seconds == pytest.approx(
        predict(settings, whole, links).step_seconds
    )


def write_count(path, **changed):
    record = {
        "rank": 3,
        "world_size": 8,
        "step": 2,
        "answer_seconds": 0.2,
        "collectives": [
            {
                "op": "all_gather", "count": 2, "bytes": 100, "group_size": 8, "stride": 1, "first_rank": 0,
                "mesh_dim": "fsdp", "phase": "forward", "side_stream": True,
            },
            {
                "op": "all_reduce", "count": 1, "bytes": 4, "group_size": 8, "stride": 1, "first_rank": 0,
                "mesh_dim": "loss", "phase": "optimizer", "side_stream": False,
            },
        ],
        "chunks": [],
        **changed,
    }  # fmt: skip
    path.write_text(json.dumps(record))
    return path


def steps_of(*seconds):
    return [StepRecord(i + 1, 8.0, 1.0, s, 1.0, 1, 1, 1, 0, 0, 0.0) for i, s in enumerate(seconds)]


def test_what_stood_for_collectives_is_no_work_of_the_rank(tmp_path):
    path = write_count(tmp_path / "c.json")
    dims = settings_of(8, data_parallel_shard_degree=8).dims
    # the counted step took 1.25 times the others: what was timed in it is shortened as much
    run = read_run(path, dims, MEMORY, steps_of(9.0, 1.25, 1.0, 1.1, 0.9), warmup=2)
    assert run.measured_steps == 3
    assert run.step_seconds == pytest.approx(1.0 - 0.2 / 1.25)
    assert [(c.op, c.cause) for c in run.collectives] == [
        (Op.ALL_GATHER, Cause.FSDP),
        (Op.ALL_REDUCE, Cause.OTHER),
    ]


def test_chunks_lose_the_same_time_in_all(tmp_path):
    chunks = [
        {"stage": 0, "kind": "F", "count": 4, "seconds": 0.4},
        {"stage": 0, "kind": "B", "count": 4, "seconds": 0.4},
    ]
    dims = settings_of(8, pipeline_parallel_degree=2, data_parallel_shard_degree=4).dims
    run = read_run(
        write_count(tmp_path / "c.json", chunks=chunks), dims, MEMORY, steps_of(9.0, 1.0, 1.0), warmup=2
    )
    assert math.fsum(chunk.count * chunk.seconds for chunk in run.chunks) == pytest.approx(0.8 - 0.2)
    assert [chunk.seconds for chunk in run.chunks] == pytest.approx([0.075, 0.075])


def test_steps_slower_than_the_counted_one_do_not_lengthen_a_pipeline(tmp_path):
    chunks = [{"stage": 0, "kind": kind, "count": 4, "seconds": 0.4} for kind in "FB"]
    dims = settings_of(8, pipeline_parallel_degree=2, data_parallel_shard_degree=4).dims
    path = write_count(tmp_path / "c.json", chunks=chunks, answer_seconds=0.0)
    disturbed = read_run(path, dims, MEMORY, steps_of(9.0, 1.0, 1.4, 1.5), warmup=2)
    assert disturbed.step_seconds == 1.0
    assert [chunk.seconds for chunk in disturbed.chunks] == pytest.approx([0.1, 0.1])


def test_another_gpu_changes_compute_and_widens_the_interval():
    settings = settings_of(8, data_parallel_shard_degree=8)
    same = gpu_factor(settings, cluster_of(1))
    faster = gpu_factor(settings, cluster_of(1, "b200"))
    assert same == 1.0 and faster > 1.0
    found = predict(settings, [run_of()], interconnect_of(settings.cluster), gpu_factor=faster)
    assert found.compute_seconds == pytest.approx(faster)
    assert found.relative_interval == pytest.approx(DATA_PARALLEL_INTERVAL + OTHER_GPU_INTERVAL)
