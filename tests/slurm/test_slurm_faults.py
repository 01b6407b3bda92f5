"""Faults injected into a real Slurm: each is told for what it is, ends in one outcome and leaves nothing behind."""

import json
import shutil
import time
from dataclasses import replace

import pytest
from slurm_helpers import SHORT, cause_of, outcome_of, processes_of, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe.record import read_outcome

pytestmark = pytest.mark.slurm

SLEEP = {"steps": 3, "then": "sleep"}
SLEEP_FIRST = {"first": SLEEP}
RETRIED = "submitted again; the second attempt completed"


@pytest.fixture
def told(fault_row):
    """Check what every outcome must be, and note the row."""

    def check(fault, probe, outcome, *, status, cause=None, attempts=1, after="told as it is"):
        assert outcome.status is status, outcome
        assert outcome.attempts == attempts
        assert read_outcome(probe.spec.directory) == outcome
        assert list(probe.spec.directory.parent.rglob("outcome.json")) == [
            probe.spec.directory / "outcome.json"
        ]
        if cause is not None:
            assert cause_of(outcome) == cause
        assert processes_of(probe) == []
        said = "; ".join([f"{status}: {outcome.message}", *outcome.warnings[: attempts - 1]])
        fault_row("Slurm", fault, said, after)

    return check


def infrastructure(**more):
    return {"status": ProbeStatus.INFRASTRUCTURE, **more}


def test_a_node_that_loses_power_costs_one_attempt(slurm, told):
    probe = slurm.start(nodes=2, scenario=SLEEP_FIRST, retries=1)
    slurm.running(probe)
    slurm.slurm.kill_node("node2")
    outcome = outcome_of(probe)
    told(
        "Power loss of a node in mid-run (its slurmd and ranks killed)",
        probe,
        outcome,
        status=ProbeStatus.COMPLETED,
        attempts=2,
        after=RETRIED,
    )
    assert "attempt 1: node node2 (down*: Not responding) failed" in outcome.warnings[0]
    said = (probe.spec.directory / "attempt1" / "stdout.log").read_text()
    assert "on node2" in said
    assert "on node2" not in (probe.spec.directory / "stdout.log").read_text()


def test_a_dead_node_is_not_taken_for_a_hang(slurm, told):
    """The probe's own deadline passes long before Slurm notices."""
    probe = slurm.start(nodes=2, scenario=SLEEP, hang_seconds=2)
    slurm.running(probe)
    slurm.slurm.kill_node("node2")
    outcome = outcome_of(probe)
    told("Power loss of a node, seen as a hang first", probe, outcome, **infrastructure(cause="node_fail"))
    assert "node node2 (down" in outcome.message


def test_a_node_set_down_is_named(either_slurm, told):
    probe = either_slurm.start(nodes=1, scenario=SLEEP)
    either_slurm.running(probe)
    either_slurm.set_down("node1")
    outcome = outcome_of(probe)
    told("Node set DOWN in mid-run", probe, outcome, **infrastructure(cause="node_fail"))
    assert "node node1" in outcome.message


def test_a_node_that_fails_again_is_excluded(slurm, told):
    runner = slurm.runner()
    for number in (1, 2):
        probe = slurm.start(runner=runner, name=f"trial{number}/t", scenario=SLEEP)
        slurm.running(probe)
        slurm.set_down("node1")
        outcome = outcome_of(probe)
        slurm.slurm.wait_for_nodes("idle")
    told(
        "The same node fails under a second probe",
        probe,
        outcome,
        **infrastructure(cause="node_fail", after="further jobs exclude the node"),
    )
    assert "node1 is excluded from now on" in outcome.message
    third = slurm.start(runner=runner, name="trial3/t")
    assert outcome_of(third).status is ProbeStatus.COMPLETED
    assert "#SBATCH --exclude=node1\n" in (third.spec.directory / "job.sh").read_text()
    assert "on node2" in (third.spec.directory / "stdout.log").read_text()


def test_a_job_that_somebody_cancels(either_slurm, told):
    probe = either_slurm.start(scenario=SLEEP, retries=1)
    either_slurm.slurm.run("scancel", either_slurm.running(probe))
    outcome = outcome_of(probe)
    told("Job cancelled by somebody else", probe, outcome, **infrastructure(cause="cancelled_outside"))
    if either_slurm.slurm.accounting:
        assert "by user id 0" in outcome.message


def test_a_time_limit(slurm, told):
    probe = slurm.start(scenario=SLEEP, retries=1)
    job = slurm.running(probe)
    slurm.slurm.run("scontrol", "update", f"JobId={job}", "EndTime=now+1seconds")
    outcome = outcome_of(probe)
    told("Slurm's time limit", probe, outcome, status=ProbeStatus.TIMEOUT, cause="time_limit")
    assert outcome.details["deadline"] == "slurm"


def test_preemption_costs_one_attempt(slurm, told):
    probe = slurm.start(nodes=4, scenario=SLEEP_FIRST, retries=1)
    slurm.running(probe)
    slurm.slurm.run("sbatch", "-p", "urgent", "-N4", "--exclusive", "--wrap", "sleep 1")
    outcome = outcome_of(probe)
    told(
        "Preempted by a job of a partition with priority",
        probe,
        outcome,
        status=ProbeStatus.COMPLETED,
        attempts=2,
        after=RETRIED,
    )
    assert "DUE TO PREEMPTION" in (probe.spec.directory / "attempt1" / "stdout.log").read_text()


def test_a_requeued_job_is_not_waited_for(slurm, told):
    probe = slurm.start(scenario=SLEEP)
    job = slurm.running(probe)
    slurm.slurm.run("scontrol", "update", f"JobId={job}", "Requeue=1")
    slurm.slurm.run("scontrol", "requeue", job)
    told("Job requeued by the administrator", probe, outcome_of(probe), **infrastructure(cause="requeued"))


def test_a_suspended_job_is_given_up(slurm, told):
    probe = slurm.start(scenario=SLEEP)
    slurm.slurm.run("scontrol", "suspend", slurm.running(probe))
    told("Job suspended", probe, outcome_of(probe), **infrastructure(cause="preempted"))


def test_an_outage_of_the_controller_goes_by_unnoticed(either_slurm, told):
    go = either_slurm.directory / "go"
    probe = either_slurm.start(nodes=2, scenario={"then": "wait", "file": str(go)})
    either_slurm.running(probe)
    either_slurm.slurm.stop_controller()
    go.touch()
    wait_until(lambda: processes_of(probe) == [])
    assert probe.poll() is None
    either_slurm.slurm.start_controller()
    told(
        "Controller stopped in mid-run and started after the ranks had ended",
        probe,
        outcome_of(probe),
        status=ProbeStatus.COMPLETED,
        after="measured: the results were in files",
    )


def test_a_submission_waits_for_the_controller(slurm, told):
    slurm.slurm.stop_controller()
    probe = slurm.start()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        assert probe.poll() is None
        time.sleep(0.05)
    slurm.slurm.start_controller()
    told(
        "Controller down when the job was to be submitted",
        probe,
        outcome_of(probe),
        status=ProbeStatus.COMPLETED,
        after="submitted once the controller was back",
    )
    name = json.loads((probe.spec.directory / "job.json").read_text())["name"]
    assert len(slurm.slurm.run("squeue", "-h", "-t", "all", "-n", name).stdout.splitlines()) == 1


def test_a_forgotten_job_costs_one_attempt(slurm, told):
    probe = slurm.start(nodes=2, scenario=SLEEP_FIRST, retries=1)
    slurm.running(probe)
    slurm.slurm.forget_everything()
    told(
        "Controller lost its state and forgot the job",
        probe,
        outcome_of(probe),
        status=ProbeStatus.COMPLETED,
        attempts=2,
        after=RETRIED,
    )
    first = json.loads((probe.spec.directory / "attempt1" / "job.json").read_text())
    assert first["job_id"] is not None


def test_a_job_that_can_never_start_says_why(either_slurm, told):
    probe = either_slurm.start(nodes=99, retries=1)
    outcome = outcome_of(probe)
    told("99 nodes of a partition that has fewer", probe, outcome, **infrastructure(cause="stuck_pending"))
    assert "PartitionConfig" in outcome.message or "PartitionNodeLimit" in outcome.message


def test_a_job_that_waits_too_long_says_for_what(slurm, told):
    blocker = slurm.slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "--wrap", "sleep 1000"
    ).stdout.strip()
    wait_until(lambda: slurm.slurm.run("squeue", "-h", "-t", "R", "-o", "%i").stdout.strip() == blocker)
    runner = slurm.runner(patience=replace(SHORT, pending=1.0))
    outcome = outcome_of(probe := slurm.start(runner=runner))
    told(
        "All nodes busy for longer than the runner waits",
        probe,
        outcome,
        **infrastructure(cause="stuck_pending"),
    )
    assert "Resources" in outcome.message or "Priority" in outcome.message
    assert outcome.seconds == 0.0
    assert slurm.slurm.live_jobs() == [blocker]
    slurm.slurm.run("scancel", blocker)
    wait_until(lambda: slurm.slurm.live_jobs() == [])


def test_a_job_that_slurm_refuses(either_slurm, told):
    probe = either_slurm.start(runner=either_slurm.runner(partition="no such"), retries=1)
    outcome = outcome_of(probe)
    told("Unknown partition", probe, outcome, **infrastructure(cause="refused"))
    assert "Invalid partition name" in outcome.message


def test_a_missing_working_folder_is_named(slurm, told, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    runner = slurm.runner()
    (tmp_path / "gone").rmdir()
    monkeypatch.chdir(tmp_path)
    outcome = outcome_of(probe := slurm.start(runner=runner))
    told("The nodes do not have the search's folder", probe, outcome, **infrastructure(cause="no_folder"))
    assert f"node1 has no folder {tmp_path}/gone" in outcome.message


def test_a_missing_trial_folder(slurm, told):
    blocker = slurm.slurm.run(
        "sbatch", "--parsable", "-N4", "--exclusive", "--wrap", "sleep 1000"
    ).stdout.strip()
    wait_until(lambda: slurm.slurm.run("squeue", "-h", "-t", "R", "-o", "%i").stdout.strip() == blocker)
    probe = slurm.start()
    slurm.job_id(probe)
    shutil.rmtree(probe.spec.directory)
    slurm.slurm.run("scancel", blocker)
    told(
        "The nodes do not have the trial folder",
        probe,
        outcome_of(probe),
        **infrastructure(cause="launch_failure"),
    )


def test_host_memory_is_the_configurations(limited_slurm, told):
    runner = limited_slurm.runner(mem="300M")
    probe = limited_slurm.start(runner=runner, scenario={"steps": 2, "then": "host-oom"}, retries=1)
    outcome = outcome_of(probe)
    told("A step exceeds its host memory", probe, outcome, status=ProbeStatus.OOM, cause="host_oom")
    assert outcome.details["memory"] == "host"


def test_a_cache_folder_of_another_user_is_not_used(slurm, told, tmp_path):
    (tmp_path / "cache-0").mkdir()
    shutil.chown(tmp_path / "cache-0", user=65534)
    outcome = outcome_of(probe := slurm.start(nodes=2))
    told("The cache folder is another user's", probe, outcome, **infrastructure(cause="cache_folder"))
    assert str(tmp_path / "cache-0") in outcome.message


def test_a_configuration_that_runs_out_of_memory_is_not_tried_again(either_slurm, told):
    probe = either_slurm.start(nodes=2, scenario={"steps": 2, "then": "oom"}, retries=1)
    outcome = outcome_of(probe)
    told("A rank runs out of GPU memory (its record is scripted)", probe, outcome, status=ProbeStatus.OOM)
    assert outcome.details["bytes_asked"] == 2 << 30
