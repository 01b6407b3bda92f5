"""Jobs that are stopped, left alone, found again, and run side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_helpers import FAKE_PYTHON, HERE, SHORT, outcome_of, processes_of, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe.record import read_outcome
from titan_tune.probe.runner import DetachableRunner
from titan_tune.probe.slurm.notes import JOB_FILE, JobNote

pytestmark = pytest.mark.slurm

SLEEP = {"steps": 3, "then": "sleep"}


def test_a_job_is_measured_on_all_its_nodes(either_slurm):
    probe = either_slurm.start(nodes=2, nproc=2)
    outcome = outcome_of(probe)
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert outcome.measurement.tokens_per_second_per_gpu == pytest.approx(1000 / 0.55, rel=0.1)
    assert [memory.rank for memory in outcome.measurement.memory] == [0, 1, 2, 3]
    assert outcome.attempts == 1
    assert read_outcome(probe.spec.directory) == outcome
    kept = {path.name for path in probe.spec.directory.iterdir()}
    assert {"config.toml", "job.sh", "job.json", "command.txt", "environment.json", "stdout.log"} <= kept


def test_what_a_job_writes_is_private(slurm):
    probe = slurm.start()
    outcome_of(probe)
    for name in ("stdout.log", "metrics.rank0.jsonl", "job.sh", "outcome.json"):
        assert (probe.spec.directory / name).stat().st_mode & 0o077 == 0, name
    assert (slurm.directory / "cache-0").stat().st_mode & 0o077 == 0


def test_the_time_in_the_queue_is_no_run_time(slurm):
    blocker = slurm.slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "--wrap", "sleep 1000"
    ).stdout.strip()
    wait_until(lambda: slurm.slurm.run("squeue", "-h", "-t", "R", "-o", "%i").stdout.strip() == blocker)
    probe = slurm.start()
    wait_until(lambda: probe.poll() or "(Resources)" in probe.progress().phase)
    assert probe.progress().seconds == 0.0
    time.sleep(2)  # Slurm's clock has seconds
    slurm.slurm.run("scancel", blocker)
    outcome = outcome_of(probe)
    assert outcome.status is ProbeStatus.COMPLETED
    assert outcome.details["queue_seconds"] > 0.5


def test_an_early_stop_ends_the_job(slurm):
    probe = slurm.start(scenario={"steps": 12, "then": "sleep"}, steps=50, target_relative_interval=0.5)
    outcome = outcome_of(probe)
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert outcome.measurement.stopped_early
    assert (outcome.measurement.measured_steps, processes_of(probe)) == (10, [])


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"hang_seconds": 0.5}, ProbeStatus.HANG),
        ({"timeout_seconds": 0.5}, ProbeStatus.TIMEOUT),
    ],
)
def test_deadlines(slurm, settings, status):
    probe = slurm.start(nodes=2, scenario=SLEEP, retries=1, **settings)
    outcome = outcome_of(probe)
    assert (outcome.status, outcome.attempts, processes_of(probe)) == (status, 1, [])


def test_cancel_waits_until_the_job_is_gone(either_slurm):
    probe = either_slurm.start(nodes=2, scenario=SLEEP, retries=1)
    either_slurm.running(probe)
    outcome = probe.cancel()
    assert (outcome.status, outcome.attempts) == (ProbeStatus.CANCELLED, 1)
    assert (processes_of(probe), either_slurm.slurm.live_jobs()) == ([], [])


def test_cancel_before_the_job_is_submitted(slurm):
    probe = slurm.start(scenario=SLEEP)
    assert probe.cancel().status is ProbeStatus.CANCELLED
    assert slurm.slurm.live_jobs() == []


def test_cancel_gives_up_on_a_controller_that_stays_away(slurm):
    runner = slurm.runner(patience=replace(SHORT, cancel=1.0))
    probe = slurm.start(runner=runner, scenario=SLEEP)
    job = slurm.running(probe)
    slurm.slurm.stop_controller()
    outcome = probe.cancel()
    assert outcome.status is ProbeStatus.CANCELLED
    assert f"job {job} may still run" in outcome.warnings[0]
    slurm.slurm.start_controller()
    slurm.slurm.run("scancel", job)
    wait_until(lambda: slurm.slurm.live_jobs() == [])


def test_jobs_run_side_by_side(slurm, tmp_path):
    (tmp_path / "met").mkdir()
    scenario = {"then": "meet", "folder": str(tmp_path / "met")}
    runner = slurm.runner()
    probes = [slurm.start(runner=runner, name=name, nodes=2, scenario=scenario) for name in ("one", "two")]
    assert [outcome_of(probe).status for probe in probes] == [ProbeStatus.COMPLETED] * 2
    # ranks that share a compile cache can lose files to each other
    assert {path.name for path in tmp_path.glob("cache*")} == {"cache-0", "cache-1"}
    assert outcome_of(slurm.start(runner=runner, name="three")).status is ProbeStatus.COMPLETED
    assert "/cache-0\n" in (tmp_path / "three" / "job.sh").read_text()


# ---- jobs that outlive their search


def test_a_job_left_running_is_found_again(either_slurm):
    go = either_slurm.directory / "go"
    runner = either_slurm.runner()
    assert isinstance(runner, DetachableRunner)
    probe = either_slurm.start(runner=runner, nodes=2, scenario={"then": "wait", "file": str(go)})
    job = either_slurm.running(probe)
    runner.detach()
    runner.close()
    assert either_slurm.slurm.live_jobs() == [job]
    again = either_slurm.runner()
    assert again.find(probe.spec) == job
    found = again.attach(probe.spec)
    assert found.poll() is None
    go.touch()
    outcome = outcome_of(found)
    assert (outcome.status, outcome.details["job_id"]) == (ProbeStatus.COMPLETED, job)
    assert outcome.measurement.time_to_first_step < 60


def test_a_job_that_ended_meanwhile_gives_its_outcome(either_slurm):
    runner = either_slurm.runner()
    probe = either_slurm.start(runner=runner, nodes=2)
    job = either_slurm.job_id(probe)
    runner.detach()
    wait_until(lambda: either_slurm.slurm.live_jobs() == [])
    found = either_slurm.runner().attach(probe.spec)
    outcome = outcome_of(found)
    assert (outcome.status, outcome.details["job_id"]) == (ProbeStatus.COMPLETED, job)
    assert outcome.seconds < 30


SEARCH_THAT_DIES = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from slurm_helpers import spec_in
from titan_tune.probe.slurm.notes import JobNote
from titan_tune.probe.slurm.runner import SlurmRunner
from titan_tune.probe.slurm.settings import SlurmSettings

original = JobNote.write
def write(note, directory):
    if note.job_id is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    original(note, directory)
JobNote.write = write

directory = Path({directory!r})
settings = SlurmSettings(python={python!r}, cache_directory=str(directory / "cache"))
runner = SlurmRunner(settings, directory=directory, study="test", poll_seconds=0.1)
started = runner.start(spec_in(directory / "trial", nodes=2, scenario={scenario!r}))
while True:
    started.poll()
    time.sleep(0.05)
"""


def test_a_search_killed_between_submission_and_note_finds_its_job(either_slurm, fault_row):
    go = either_slurm.directory / "go"
    scenario = {"then": "wait", "file": str(go)}
    text = SEARCH_THAT_DIES.format(
        here=str(HERE), directory=str(either_slurm.directory), python=str(FAKE_PYTHON), scenario=scenario
    )
    environ = {**either_slurm.slurm.env, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", text], env=environ, timeout=60)
    assert died.returncode == -signal.SIGKILL
    spec = either_slurm.spec(nodes=2, scenario=scenario)
    assert json.loads((spec.directory / JOB_FILE).read_text())["job_id"] is None
    (job,) = either_slurm.slurm.live_jobs()
    runner = either_slurm.runner()
    assert runner.find(spec) == job
    found = runner.attach(spec)
    go.touch()
    outcome = outcome_of(found)
    assert (outcome.status, outcome.details["job_id"]) == (ProbeStatus.COMPLETED, job)
    fault_row(
        "Slurm",
        "Search killed (SIGKILL) between sbatch and the note of the job's id",
        f"{outcome.status}: {outcome.message}",
        "found by the job's name; not submitted twice",
    )


def test_a_search_killed_before_submission_left_no_job(either_slurm):
    spec = either_slurm.spec()
    JobNote("tt-test-never-submitted", 1).write(spec.directory)
    runner = either_slurm.runner()
    assert runner.find(spec) is None
    outcome = outcome_of(runner.attach(spec))
    assert outcome.status is ProbeStatus.CANCELLED
    assert "before its job was submitted" in outcome.message


def test_a_trial_without_a_job_is_not_attached(slurm):
    assert slurm.runner().attach(slurm.spec()) is None


# ---- hostile strings


def test_hostile_strings_reach_ranks_as_they_are(slurm):
    hostile = """a b"c'd$(touch canary)`touch canary`;#%j|&é\\n"""
    folder = hostile.replace("\\", "")
    spec = replace(slurm.spec(f"{folder}/trial"), environment=(("FAKE_SCENARIO", "{}"), ("HOSTILE", hostile)))
    runner = slurm.runner(
        extra_sbatch_lines=("--comment='$(touch canary)'",), srun_arguments=("--comment=$(touch canary)",)
    )
    probe = runner.start(spec)
    assert outcome_of(probe).status is ProbeStatus.COMPLETED
    seen = json.loads((spec.directory / "seen.json").read_text())
    assert seen["environment"]["HOSTILE"] == hostile
    assert seen["arguments"][-1] == str(spec.directory / "config.toml")
    for place in (Path.cwd(), spec.directory, slurm.slurm.root / "jobs"):
        assert not (place / "canary").exists()


def test_the_callers_secrets_do_not_reach_the_job(slurm, monkeypatch):
    slurm.environ |= {
        "PGPASSWORD": "hunter2",
        "HF_TOKEN": "hunter2",
        "NCCL_DEBUG": "WARN",
        "SECRET_URL": "hunter2",
    }
    probe = slurm.start()
    outcome_of(probe)
    seen = json.loads((probe.spec.directory / "seen.json").read_text())["environment"]
    assert "hunter2" not in seen.values()
    assert seen["NCCL_DEBUG"] == "WARN"
    for path in probe.spec.directory.iterdir():
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path
