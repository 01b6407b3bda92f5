import json

import pytest
from probe_helpers import spec_in

from titan_tune.probe import files
from titan_tune.probe.measurement import phases, trend

HEADER = {
    "kind": "header", "process_start": 10.0, "plugin_import": 14.0, "training_start": 15.0,
    "float8_linear_modules": 3, "linear_modules": 1,
}  # fmt: skip


def step(number, *, time, seconds=1.0, **more):
    return {
        "kind": "step", "step": number, "loss": 8.0, "grad_norm": 2.0 / number, "step_seconds": seconds,
        "tokens_per_second": 1.0, "active_bytes": 1, "reserved_bytes": 1, "device_bytes": 1, "alloc_retries": 0,
        "ooms": 0, "time": time, **more,
    }  # fmt: skip


def metrics_of(directory, *ranks):
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"metrics.rank{rank}.jsonl").write_text(text)
    metrics = files.Metrics(directory)
    metrics.read_new()
    return metrics


def test_phases_add_up_and_wait_for_the_last_rank(tmp_path):
    late = {**HEADER, "process_start": 11.0, "training_start": 16.0}
    steps = [step(1, time=20.0), {"kind": "compile", "compile_seconds": 2.5}, step(2, time=22.0)]
    metrics = metrics_of(tmp_path, [HEADER, *steps], [late, step(1, time=20.5), step(2, time=22.5)])
    found = phases(metrics, launched=9.0, ended=25.0)
    assert found == {
        "launch": 1.0, "imports": 4.0, "init": 2.0, "first_step": 4.5, "steps": 2.0, "shutdown": 2.5, "compile": 2.5
    }  # fmt: skip
    assert sum(found.values()) - found["compile"] == pytest.approx(25.0 - 9.0)


def test_phases_of_a_probe_that_took_no_step(tmp_path):
    assert phases(metrics_of(tmp_path), launched=9.0, ended=25.0) == {}
    found = phases(metrics_of(tmp_path, [HEADER]), launched=9.0, ended=25.0)
    assert found == {"launch": 1.0, "imports": 4.0, "init": 1.0, "shutdown": 10.0}


def test_the_trend_is_the_worst_ranks(tmp_path):
    first = {"captured_graphs": 5, "recompilations": 1, "graph_breaks": 0, "fused_collective_matmuls": 8}
    last = {**first, "captured_graphs": 7, "recompilations": 3}
    quiet = [HEADER, *(step(i, time=i) for i in range(1, 8)), {"kind": "end", **first}]
    loud = [
        HEADER,
        step(1, time=1.0, alloc_retries=2),
        {"kind": "compile", **first},
        step(2, time=2.0, alloc_retries=2),
        *(step(i, time=i, alloc_retries=3) for i in range(3, 7)),
        step(7, time=7.0, seconds=2.0, alloc_retries=3),
        {"kind": "end", **{**last, "fused_collective_matmuls": 0}},
    ]
    found = trend(spec_in(tmp_path, nproc=2), metrics_of(tmp_path, quiet, loud))
    assert found["recompilations"] == 3
    assert found["late_compilations"] == 2
    assert (found["alloc_retries"], found["late_alloc_retries"]) == (3, 1)
    assert found["slow_steps"] == 1
    # measured steps 3 to 7: 1, 1, 1, 1, 2 seconds
    assert found["step_jitter"] == pytest.approx(0.6)
    assert (found["grad_norm_first"], found["grad_norm_max"]) == (2.0, 2.0)
    assert found["grad_norm_last"] == pytest.approx(2 / 7)
    assert (found["float8_linear_modules"], found["linear_modules"]) == (3, 1)
    assert found["fused_collective_matmuls"] == 0
    assert found["not_finite"] is False


def test_the_trend_of_what_was_not_asked_for_and_not_seen(tmp_path):
    spec = spec_in(tmp_path)
    assert trend(spec, metrics_of(tmp_path)) == {}
    lines = [
        {"kind": "header"},
        step(1, time=1.0, grad_norm=None),
        {"kind": "compile", "fused_collective_matmuls": None},
    ]
    found = trend(spec, metrics_of(tmp_path, lines))
    assert found["fused_collective_matmuls"] is None
    assert (found["step_jitter"], found["slow_steps"]) == (None, 0)
    assert found["grad_norm_max"] is None
    assert found["float8_linear_modules"] is None
