"""What the terminal shows of a dry run."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeOutcome, ProbeStatus, RankMemory
from titan_tune.estimate.collectives import Cause, CollectiveRecord, Op
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.probe.dry_run_answer import answer_from
from titan_tune.probe.dry_run_model import Chunk, RankRun, predict
from titan_tune.probe.dry_run_outcome import dry_run_details
from titan_tune.report.dry_run import dry_run_view
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve
from titan_tune.units import GIB

JOB = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
data_parallel_shard_degree = 4
"""
MACHINE = ClusterSpec(gpu=gpu_spec("h200"))


def shown(outcome, settings, values):
    answer = answer_from(settings, values, MACHINE, outcome, tokens_per_step_per_rank=4 * 2048 / 2)
    console = Console(width=120, record=True, file=StringIO())
    console.print(dry_run_view(answer))
    return console.export_text()


def outcome_of(settings):
    gather = CollectiveRecord(Op.ALL_GATHER, 32, 4e8, 4, 1, 0, "forward", Cause.FSDP)
    runs = [
        RankRun(
            rank,
            RankMemory(rank, (30 + position) * GIB, 40 * GIB, 0),
            2.0,
            3,
            (gather,),
            (Chunk(position, "F", 4, 0.1), Chunk(position, "B", 4, 0.2)),
        )
        for position, rank in enumerate((0, 4))
    ]
    prediction = predict(settings, runs, interconnect_of(settings.cluster))
    details = dry_run_details(settings, MACHINE, runs, prediction, outside_bytes=2.0 * GIB)
    return ProbeOutcome(ProbeStatus.COMPLETED, "", 1.0, details={"dry_run": details})


def test_ranks_speed_and_collectives_are_shown():
    job = job_from_text(JOB, name="job")
    settings = resolve(job, ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8))
    text = shown(outcome_of(settings), settings, job.resolved())
    assert text.startswith("fits")
    for line in ("0  0  30.0 GiB", "4  1  31.0 GiB", "compute only", "pipeline bubble", "all gather"):
        assert line.split() == [word for word in line.split() if word in text], line
    assert "compute only     2.000 s  2,048 tokens/s per GPU" in " ".join(
        part for part in text.splitlines() if part.startswith("compute only")
    )
    assert "ranks 0, 4 of 8" in text
    assert "minimum" not in text


def test_a_refusal_is_shown_as_one():
    job = job_from_text(JOB, name="job")
    settings = resolve(job, ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8))
    refused = replace(outcome_of(settings), status=ProbeStatus.UNSUPPORTED, message="KeyError: 'float8'")
    text = shown(refused, settings, job.resolved())
    assert text.startswith("invalid") and "KeyError: 'float8'" in text
