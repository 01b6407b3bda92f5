"""``estimate --method trace``: what is said before and while it runs; the trace itself is replaced."""

from __future__ import annotations

from typing import Any

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli.tracing import trace_seconds, tracer
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve

JOB = '[model]\nname = "llama3"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = {batch}\n'
PIPELINE = "[parallelism]\ntensor_parallel_degree = 8\npipeline_parallel_degree = 2\n"


def job(flavor: str, batch: int, rest: str = "") -> Any:
    return job_from_text(JOB.format(flavor=flavor, batch=batch) + rest, name="job")


def settings(made: Any, nodes: int) -> Any:
    return resolve(made, ClusterSpec(gpu=gpu_spec("h100-80gb"), num_nodes=nodes, gpus_per_node=8))


def test_the_range_holds_the_measured_times_and_grows_with_the_microbatches() -> None:
    low, high = trace_seconds(settings(job("8B", 1), 1))
    assert low < 57 < high
    low, high = trace_seconds(settings(job("70B", 4, PIPELINE), 8))
    assert low < 462 / 2 < high
    assert trace_seconds(settings(job("70B", 8, PIPELINE), 8))[1] > 1.9 * (high - 30)


def test_every_rank_is_announced_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def traced(*arguments: Any, on_rank: Any) -> str:
        asked.append(arguments)
        on_rank(0, 2)
        on_rank(1, 2)
        return "traced"

    monkeypatch.setattr("titan_tune.estimate.traced.traced_memory", traced)
    made = job("70B", 4, PIPELINE)
    of = settings(made, 8)
    assert tracer(made, of, {})() == "traced"
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert [line for line in lines if "pipeline rank 0 of 2" in line and "(53 s to 4 min 30 s)" in line]
    assert any("pipeline rank 1 of 2" in line for line in lines)
    assert captured.out == "" and asked == [(of, {}, made.model_args)]
