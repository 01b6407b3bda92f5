import json
import math
import os
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from probe_helpers import HERE, fake_command, processes_with, spec_in, wait_for_outcome, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.errors import InputError
from titan_tune.probe import files
from titan_tune.probe.classify import StopReason
from titan_tune.probe.launch import command_text, probe_environment, torchrun_command
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.record import read_outcome


@pytest.fixture
def run(tmp_path):
    """Run a scenario of the fake launcher to its outcome."""
    runners = []

    def start(*, spec=None, grace_seconds=0.3, settings=None, nproc=1, **scenario):
        command = fake_command(ranks=nproc, **scenario)
        runner = LocalRunner(2, "cpu", grace_seconds=grace_seconds, command=command, launcher="torchrun")
        runners.append(runner)
        return runner.start(spec or spec_in(tmp_path, nproc=nproc, **(settings or {})))

    yield start
    for runner in runners:
        runner.close()


def test_a_completed_probe_is_measured_and_leaves_its_files(run, tmp_path):
    outcome = wait_for_outcome(run(steps=10, nproc=2))
    assert outcome.status is ProbeStatus.COMPLETED
    measurement = outcome.measurement
    assert measurement.tokens_per_second_per_gpu == pytest.approx(2000.0)
    assert (measurement.measured_steps, measurement.warmup_steps) == (8, 2)
    assert measurement.step_seconds == pytest.approx(0.5)
    assert [rank.rank for rank in measurement.memory] == [0, 1]
    assert measurement.peak_active_bytes == 110
    assert measurement.memory_kind == "rss"
    assert len(measurement.losses) == 10
    kept = {path.name for path in (tmp_path / "trial").iterdir()}
    assert {"config.toml", "command.txt", "environment.json", "outcome.json", "stdout.log"} <= kept
    assert read_outcome(tmp_path / "trial") == outcome


def test_an_early_stop_is_a_completed_probe(run):
    probe = run(steps=9, then="sleep", settings={"steps": 50, "min_measured_steps": 6})
    outcome = wait_for_outcome(probe)
    assert outcome.status is ProbeStatus.COMPLETED
    assert outcome.measurement.stopped_early
    assert outcome.measurement.measured_steps == 7
    assert processes_with(probe._attempt.warden.probe_id) == []


def test_a_probe_that_cannot_win_is_given_up_and_counts(run, tmp_path):
    # 1000 tokens in half a second a step: 2000 tokens/s
    spec = replace(spec_in(tmp_path, steps=50), beat=2500.0)
    outcome = wait_for_outcome(run(spec=spec, steps=5, then="sleep"))
    assert outcome.status is ProbeStatus.COMPLETED
    assert outcome.message == "5 steps, given up: it cannot win"
    assert outcome.details["cannot_win"] is True
    assert outcome.measurement.stopped_early
    assert outcome.measurement.measured_steps == 3
    assert outcome.measurement.tokens_per_second_per_gpu == pytest.approx(2000.0)


def test_a_probe_that_may_still_win_goes_on(run, tmp_path):
    spec = replace(spec_in(tmp_path, steps=10), beat=2050.0)
    outcome = wait_for_outcome(run(spec=spec, steps=10))
    assert outcome.message == "10 steps"
    assert not outcome.measurement.stopped_early


def test_a_probe_ends_with_its_last_step(run):
    # the ranks would sleep for ever, but have said that they are done
    outcome = wait_for_outcome(run(steps=10, nproc=2, then="sleep", end=True))
    assert (outcome.status, outcome.message) == (ProbeStatus.COMPLETED, "10 steps")
    assert not outcome.measurement.stopped_early


@pytest.mark.parametrize(
    ("scenario", "settings", "status"),
    [
        ({"steps": 3}, {"hang_seconds": 0.3}, ProbeStatus.HANG),
        ({"steps": 0}, {"startup_seconds": 0.3}, ProbeStatus.TIMEOUT),
        ({"steps": 3}, {"timeout_seconds": 0.3}, ProbeStatus.TIMEOUT),
    ],
)
def test_deadlines(run, scenario, settings, status):
    probe = run(then="stubborn", settings=settings, **scenario)
    assert wait_for_outcome(probe).status is status
    assert processes_with(probe._attempt.warden.probe_id) == []


def test_a_loss_that_is_not_a_number_ends_the_probe(run, tmp_path):
    outcome = wait_for_outcome(run(steps=4, then="nan"))
    assert outcome.status is ProbeStatus.DIVERGED
    text = (tmp_path / "trial" / "outcome.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert math.isnan(read_outcome(tmp_path / "trial").measurement.losses[-1])


def test_cancel_ends_workers_that_ignore_sigterm(run):
    probe = run(then="stubborn", steps=2)
    probe_id = probe._attempt.warden.probe_id
    wait_until(lambda: len(processes_with(probe_id)) >= 3)
    outcome = probe.cancel()
    assert outcome.status is ProbeStatus.CANCELLED
    assert processes_with(probe_id) == []
    assert probe.poll() is outcome


def test_an_infrastructure_failure_is_tried_again_and_its_files_are_kept(run, tmp_path):
    outcome = wait_for_outcome(run(steps=10, then="busy-port", settings={"retries": 1}))
    assert (outcome.status, outcome.attempts) == (ProbeStatus.COMPLETED, 2)
    assert "EADDRINUSE" in (tmp_path / "trial" / "attempt1" / "stdout.log").read_text()
    assert "EADDRINUSE" not in (tmp_path / "trial" / "stdout.log").read_text()


def test_retries_end(run):
    outcome = wait_for_outcome(run(steps=10, then="busy-port", settings={"retries": 0}))
    assert (outcome.status, outcome.attempts) == (ProbeStatus.INFRASTRUCTURE, 1)


def test_a_second_run_in_a_folder_sets_the_first_aside(run, tmp_path):
    wait_for_outcome(run(steps=10))
    first = (tmp_path / "trial" / "outcome.json").read_text()
    wait_for_outcome(run(steps=10))
    assert (tmp_path / "trial" / "earlier1" / "outcome.json").read_text() == first


def test_a_killed_warden_leaves_nothing_behind(run):
    probe = run(then="stubborn", steps=2)
    probe_id = probe._attempt.warden.probe_id
    wait_until(lambda: len(processes_with(probe_id)) >= 3)
    probe._attempt.warden.process.kill()
    assert wait_for_outcome(probe).status is ProbeStatus.INFRASTRUCTURE
    assert processes_with(probe_id) == []


HOST = """
import pathlib, sys, time
sys.path.insert(0, {here!r})
from probe_helpers import fake_command, spec_in
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.record import read_outcome
command = fake_command(then="stubborn", steps=2)
runner = LocalRunner(1, "cpu", grace_seconds=0.3, command=command, launcher="torchrun")
probe = runner.start(spec_in(pathlib.Path({directory!r})))
while True:
    probe.poll()
    time.sleep(0.05)
"""


def test_sigkill_of_the_search_leaves_no_process(tmp_path):
    mark = f"SEARCH_TEST={uuid.uuid4().hex}"
    name, value = mark.split("=")
    root = str(Path(files.__file__).parents[2])
    search = subprocess.Popen(
        [sys.executable, "-c", HOST.format(here=str(HERE), directory=str(tmp_path))],
        env={**os.environ, name: value, "PYTHONPATH": root},
    )
    # search, warden, launcher and the launcher's child
    wait_until(lambda: len(processes_with(mark)) >= 4)
    search.send_signal(signal.SIGKILL)
    search.wait()
    wait_until(lambda: processes_with(mark) == [])


def test_progress_follows_the_probe(run):
    probe = run(steps=3, then="sleep")
    wait_until(lambda: probe.poll() or probe.progress().step == 3)
    progress = probe.progress()
    assert (progress.phase, progress.steps) == ("step", 10)
    assert progress.tokens_per_second == pytest.approx(2000.0)
    probe.request_stop(StopReason.CANCELLED)
    assert probe.progress().phase == "stopping"


def test_close_cancels_what_runs(tmp_path):
    command = fake_command(then="sleep")
    with LocalRunner(1, "cpu", grace_seconds=0.3, command=command, launcher="torchrun") as runner:
        probe = runner.start(spec_in(tmp_path))
    assert probe.outcome.status is ProbeStatus.CANCELLED


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nproc": 3}, "nproc_per_node=3"),
        ({"steps": 4, "warmup_steps": 4}, "warmup_steps=4"),
    ],
)
def test_a_spec_that_cannot_run_is_refused(tmp_path, change, says):
    with LocalRunner(2, "cpu") as runner, pytest.raises(InputError, match=says):
        runner.start(spec_in(tmp_path, **change))


def test_the_environment_of_a_probe(tmp_path, monkeypatch):
    spec = spec_in(tmp_path, nproc=2, environment=[("MINE", "1")])
    environment = probe_environment(spec, "id", {"CUDA_VISIBLE_DEVICES": "3"})
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["MINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert "PYTORCH_ALLOC_CONF" not in environment


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_are_kept(tmp_path, name):
    spec = replace(spec_in(tmp_path), device="cuda")
    assert probe_environment(spec, "id", {})["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    kept = probe_environment(spec, "id", {name: "mine"})
    assert kept[name] == "mine"
    assert "expandable_segments:True" not in kept.values()


def test_the_command_can_be_run_by_hand_without_overwriting_measurements(tmp_path):
    spec = spec_in(tmp_path)
    text = command_text(torchrun_command(spec), probe_environment(spec, "id", {}), {})
    assert "torch.distributed.run" in text
    assert "TITAN_TUNE_METRICS_DIR" not in text
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0


def test_metrics_that_were_set_aside_are_no_error(tmp_path):
    path = tmp_path / "metrics.rank0.jsonl"
    path.write_text('{"kind": "header", "rank": 0}\n')
    metrics = files.Metrics(tmp_path)
    assert metrics.read_new()
    path.rename(tmp_path / "gone")
    log = metrics.logs[0]
    assert not log.read_new()
