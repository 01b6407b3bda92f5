"""Dry runs of the real torchtitan on a processor: every rank of a job runs alone, and its collectives are counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dry_run_jobs import cluster_of, job_text, spec_of
from probe_helpers import wait_for_outcome

from titan_tune.domain.probe import ProbeStatus
from titan_tune.machine import local_cluster
from titan_tune.probe.dry_run import DryRunner

pytestmark = pytest.mark.torchtitan

ROOT = Path(__file__).parents[2]
LAYERS, BATCH, SEQ, DIM, VOCAB = 6, 4, 64, 64, 512
BLOCK = 65_664
"""Parameters of a block: 4 D² of attention, 3 D F of the feed-forward (F = 256), two norms."""


def count_of(directory, world_size, rank, **job):
    """What one rank of the job writes when it runs alone, in three steps."""
    directory.mkdir(parents=True, exist_ok=True)
    text = job_text(batch=BATCH, layers=LAYERS, **job).replace("steps = 25", "steps = 3")
    (directory / "config.toml").write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NGPU": str(world_size),
        "TITAN_TUNE_DRY_RUN_RANK": str(rank),
        "TITAN_TUNE_METRICS_DIR": str(directory),
        "LOCAL_RANK": "0",
    }
    command = [
        sys.executable, "-m", "torchtitan.train", "--job.config_file", str(directory / "config.toml"),
        "--comm.mode=fake_backend", "--job.dump_folder", str(directory / "outputs"),
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    steps = [
        line
        for line in map(json.loads, (directory / f"metrics.rank{rank}.jsonl").read_text().splitlines())
        if line["kind"] == "step"
    ]
    assert len(steps) == 3
    # a norm that is small and finite: nothing was computed from memory that nobody wrote
    assert all(isinstance(step["grad_norm"], float) and 0 < step["grad_norm"] < 1e4 for step in steps)
    return json.loads((directory / f"collectives.rank{rank}.json").read_text())


def large(counted, mesh_dim):
    """(op, phase, bytes) to calls, of a mesh dimension; what has a few bytes is left out."""
    return {
        (row["op"], row["phase"], row["bytes"]): row["count"]
        for row in counted["collectives"]
        if row["mesh_dim"] == mesh_dim and row["bytes"] > 4096
    }


def group(counted, mesh_dim):
    return {
        (row["group_size"], row["stride"], row["first_rank"])
        for row in counted["collectives"]
        if row["mesh_dim"] == mesh_dim
    }


def fsdp_calls(block, embedding, output):
    """Blocks and embedding are gathered for forward and again for backward, norm and output once."""
    return {
        ("all_gather", "forward", 2 * block): LAYERS,
        ("all_gather", "backward", 2 * block): LAYERS,
        ("reduce_scatter", "backward", 4 * block): LAYERS,
        ("all_gather", "forward", 2 * embedding): 1,
        ("all_gather", "backward", 2 * embedding): 1,
        ("reduce_scatter", "backward", 4 * embedding): 1,
        ("all_gather", "forward", 2 * output): 1,
        ("reduce_scatter", "backward", 4 * output): 1,
    }


def test_fsdp_and_hsdp_gather_scatter_and_reduce_every_block(tmp_path):
    table = VOCAB * DIM
    counted = count_of(tmp_path, 8, 5, data_parallel_replicate_degree=2, data_parallel_shard_degree=4)
    assert (counted["rank"], counted["world_size"], counted["step"], counted["chunks"]) == (5, 8, 2, [])
    assert large(counted, "fsdp") == fsdp_calls(BLOCK, table, table + DIM)
    assert large(counted, "dp_replicate") == {
        ("all_reduce", "backward", BLOCK): LAYERS,  # fp32, over four shards
        ("all_reduce", "backward", table): 1,
        ("all_reduce", "backward", table + DIM): 1,
    }
    assert group(counted, "fsdp") == {(4, 1, 4)}
    assert group(counted, "dp_replicate") == {(2, 4, 1)}


def test_tensor_parallelism_gathers_and_scatters_twice_a_block_and_direction(tmp_path):
    counted = count_of(tmp_path, 8, 6, tensor_parallel_degree=2, data_parallel_shard_degree=4)
    hidden = 2 * BATCH * SEQ * DIM
    # two around attention and two around the feed-forward; one after the embedding or before the output
    assert large(counted, "tp") == {
        (op, phase, hidden): 2 * LAYERS + 1
        for op in ("all_gather", "reduce_scatter")
        for phase in ("forward", "backward")
    }
    assert group(counted, "tp") == {(2, 1, 6)}
    assert group(counted, "fsdp") == {(4, 2, 0)}
    assert counted["answer_seconds"] > 0


def test_ddp_reduces_its_buckets(tmp_path):
    counted = count_of(tmp_path, 4, 3, data_parallel_replicate_degree=4, data_parallel_shard_degree=1)
    total = 4 * (LAYERS * BLOCK + 2 * VOCAB * DIM + DIM)
    calls = large(counted, "dp_replicate")
    assert {(op, phase) for op, phase, _ in calls} == {("all_reduce", "backward")}
    assert sum(size * count for (_, _, size), count in calls.items()) == total


@pytest.mark.parametrize(
    ("schedule", "rank", "chunks"),
    [
        ("1F1B", 0, {(0, "F"), (0, "B")}),
        ("1F1B", 1, {(1, "F"), (1, "B")}),
        ("1F1B", 3, {(3, "F"), (3, "B")}),
        ("Interleaved1F1B", 2, {(2, "F"), (2, "B"), (6, "F"), (6, "B")}),
        ("ZBVZeroBubble", 0, {(0, "F"), (0, "I"), (0, "W"), (7, "F"), (7, "I"), (7, "W")}),
    ],
)
def test_a_pipeline_rank_runs_without_its_neighbours(tmp_path, schedule, rank, chunks):
    counted = count_of(tmp_path, 4, rank, pipeline_parallel_degree=4, pipeline_parallel_schedule=schedule)
    assert {(c["stage"], c["kind"]) for c in counted["chunks"]} == chunks
    assert all(c["count"] == BATCH and c["seconds"] >= 0 for c in counted["chunks"])
    hidden = 4 * SEQ * DIM  # fp32: a pipeline without FSDP has no mixed precision
    stages, last = {stage for stage, _ in chunks}, 3 if schedule == "1F1B" else 7
    ways = {
        ("recv", "forward"): sum(stage > 0 for stage in stages),
        ("send", "forward"): sum(stage < last for stage in stages),
        ("recv", "backward"): sum(stage < last for stage in stages),
        ("send", "backward"): sum(stage > 0 for stage in stages),
    }
    expected = {(*way, hidden): BATCH * count for way, count in ways.items() if count}
    assert large(counted, "pp") == expected


def test_the_runner_says_valid_on_a_processor_and_passes_a_refusal_on(tmp_path):
    machine = local_cluster()
    if not machine.gpu.is_cpu:
        pytest.skip("this machine has a GPU")
    with DryRunner(cluster_of(16), machine) as runner:
        valid = runner.start(
            spec_of(tmp_path / "valid", 16, data_parallel_shard_degree=8, tensor_parallel_degree=2)
        )
        outcome = wait_for_outcome(valid, seconds=250)
        assert outcome.status is ProbeStatus.COMPLETED, outcome
        assert outcome.message.startswith("valid: rank 0 of 16 ran 2 steps on a processor")
        spec = spec_of(tmp_path / "refused", 16, data_parallel_shard_degree=2, tensor_parallel_degree=8)
        refused = wait_for_outcome(runner.start(spec), seconds=250)
    # eight-way tensor parallelism of four heads: torchtitan's forward fails, the fake backend is not to blame
    assert refused.status is ProbeStatus.UNSUPPORTED
    assert refused.details["simulated_rank"] == 0
