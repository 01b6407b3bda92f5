"""Node ledger, environments, Slurm's text output: the parts that need no Slurm."""

import time

import pytest
from slurm_helpers import spec_in, wait_until

from titan_tune.probe.slurm.commands import Commands
from titan_tune.probe.slurm.environment import command_environment, script_environment, submission_environment
from titan_tune.probe.slurm.jobs import JobRow, Listing, SubmissionError, UnreachableError
from titan_tune.probe.slurm.monitor import Monitor
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.notes import job_label
from titan_tune.probe.slurm.settings import SlurmSettings

# ---- nodes


def test_a_node_is_bad_after_its_second_failure():
    ledger = NodeLedger()
    assert ledger.blame(["a", "b"]) == ()
    assert ledger.blame(["a"]) == ("a",)
    assert ledger.blame(["a"]) == ()
    assert ledger.bad == ("a",)


def test_a_job_keeps_as_many_nodes_as_it_needs():
    ledger = NodeLedger()
    for node in "aabbb":
        ledger.blame([node])
    nodes = ("a", "b", "c", "d")
    assert ledger.excluded(["c", "gone"], available=nodes, needed=1) == ("b", "a", "c")
    assert ledger.excluded(["c"], available=nodes, needed=3) == ("b",)
    assert ledger.excluded(["c"], available=nodes, needed=9) == ()


# ---- environments


def test_what_a_job_inherits():
    inherited = {
        "PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "SBATCH_ACCOUNT": "ml", "SLURM_CONF": "/c",
        "PGPASSWORD": "x", "TITAN_TUNE_STORAGE": "postgresql://u:x@h", "HF_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "3",
        "SLURM_JOB_ID": "7", "EDITOR": "vi", "BASH_FUNC_module%%": "() { :; }",
        "SBATCH_WAIT": "1",
    }  # fmt: skip
    assert set(submission_environment(inherited)) == {
        "PATH", "LC_ALL", "NCCL_DEBUG", "SBATCH_ACCOUNT", "SLURM_CONF", "BASH_FUNC_module%%",
    }  # fmt: skip
    decided = submission_environment(inherited, SlurmSettings(account="other"))
    assert "SBATCH_ACCOUNT" not in decided
    assert {"SLURM_CONF", "PATH"} <= set(command_environment(inherited))
    assert "SLURM_JOB_ID" not in command_environment({**inherited, "SQUEUE_FORMAT": "%i"})
    assert "SQUEUE_FORMAT" not in command_environment({"SQUEUE_FORMAT": "%i"})


def test_what_a_script_exports(tmp_path):
    spec = spec_in(tmp_path / "trial", nproc=2, device="cuda")
    exported = script_environment(spec, "mark", {"PATH": "/bin", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x"})
    assert exported["TITAN_TUNE_METRICS_DIR"] == str(tmp_path / "trial")
    assert exported["TITAN_TUNE_PROBE_ID"] == "mark"
    assert exported["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert exported["NCCL_DEBUG"] == "INFO"
    assert {"PATH", "HF_TOKEN", "TITAN_TUNE_CACHE_DIR"}.isdisjoint(exported)


def test_a_jobs_name_has_no_character_that_slurm_reads(tmp_path):
    assert job_label("my study, no. 1|'x'", tmp_path / "0007-ab12") == "tt-my_study_no._1_x-0007-ab12"
    assert job_label("", tmp_path / "t") == "tt-t"


# ---- output


def commands(tmp_path, **programs):
    """The commands, with stand-ins for Slurm's programs."""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return Commands({"PATH": f"{tmp_path}:/usr/bin:/bin"}, seconds=5)


def test_a_row_of_squeue():
    row = JobRow.parse("7|PENDING|N/A|2|2||ReqNodeNotAvail, UnavailableNodes:node2|a|b")
    assert (row.job_id, row.state, row.start, row.num_nodes) == ("7", "PENDING", None, 2)
    assert (row.reason, row.name) == ("ReqNodeNotAvail, UnavailableNodes:node2", "a|b")
    assert JobRow.parse("7|RUNNING|1796000846|2|2|node[1-2]|None|x").start == 1796000846.0


@pytest.mark.parametrize(
    ("said", "reachable"),
    [
        ("slurm_load_jobs error: Invalid job id specified", True),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", False),
        ("something that no version has said yet", False),
    ],
)
def test_no_such_job_is_told_from_no_answer(tmp_path, said, reachable):
    found = commands(tmp_path, squeue=f"echo '{said}' >&2; exit 1").listing(["7"])
    assert (found.reachable, found.jobs) == (reachable, {})


def test_submissions(tmp_path):
    script = tmp_path / "job.sh"
    assert commands(tmp_path, sbatch="echo '123;cluster'").submit(script, _path(tmp_path)) == "123"
    refused = commands(
        tmp_path, sbatch="echo 'sbatch: error: Batch job submission failed: Invalid qos' >&2; exit 1"
    )
    with pytest.raises(SubmissionError, match="Invalid qos") as error:
        refused.submit(script, _path(tmp_path))
    assert not error.value.limited
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    with pytest.raises(SubmissionError) as error:
        commands(tmp_path, sbatch=f'echo "{policy}" >&2; exit 1').submit(script, _path(tmp_path))
    assert error.value.limited
    with pytest.raises(UnreachableError):
        commands(tmp_path, sbatch="echo 'Socket timed out on send/recv operation' >&2; exit 1").submit(
            script, _path(tmp_path)
        )


def test_a_command_that_does_not_come_back_is_no_answer(tmp_path):
    slow = commands(tmp_path, squeue="exec sleep 1000", sbatch="exec sleep 1000")
    slow.seconds = 0.2
    assert not slow.listing(["7"]).reachable
    with pytest.raises(UnreachableError):
        slow.submit(tmp_path / "job.sh", _path(tmp_path))


SHOWN = (
    "JobId=7 JobName=tt-x UserId=a(1) JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0 StartTime=100 EndTime=160 "
    "NodeList=node1,node2 BatchHost=node1 Command=/x/JobState=COMPLETED"
)


def test_an_end_without_accounting(tmp_path):
    slurm = commands(
        tmp_path,
        scontrol=f"echo '{SHOWN}'",
        sinfo="echo 'node1|idle|none'; echo 'node2|down*|lost | power'",
        sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1",
    )
    end = slurm.end_of("7", "tt-x")
    assert (end.state, end.exit_code, end.nodes, end.batch_host) == ("FAILED", 7, ("node1", "node2"), "node1")
    assert (end.started, end.ended, end.accounted) == (100.0, 160.0, True)
    assert end.bad_nodes == {"node2": "down*: lost | power"}
    assert slurm.end_of("7", "another").state == ""


def test_an_end_that_only_the_accounting_knows(tmp_path):
    rows = (
        "7|CANCELLED by 1001|0:0|node1|100|160|tt-x",
        "7.batch|CANCELLED|0:15|node1|100|160|batch",
        "7.0|OUT_OF_MEMORY|0:125|node1|100|160|bash",
    )
    accounting = "\n".join(f"echo '{row}'" for row in rows)
    slurm = commands(
        tmp_path, scontrol="echo 'Invalid job id specified' >&2; exit 1", sinfo="", sacct=accounting
    )
    end = slurm.end_of("7", "tt-x")
    assert (end.state, end.cancelled_by, end.nodes) == ("CANCELLED", "1001", ("node1",))
    assert end.step_states == ("CANCELLED", "OUT_OF_MEMORY")
    assert slurm.end_of("7", "another").state == ""


def _path(tmp_path):
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


# ---- the monitor


def test_the_monitor_asks_for_all_jobs_at_once_and_never_waits():
    asked = []

    def listing(ids):
        asked.append(ids)
        time.sleep(0.2)
        return Listing(reachable=True, jobs={"1": JobRow("1", "RUNNING", None, 1, 1, "a", "")})

    monitor = Monitor(listing, interval=0.0)
    try:
        monitor.watch("1")
        monitor.watch("2")
        assert monitor.seen("1") is None
        first = wait_until(lambda: monitor.seen("1"))
        assert first.row.state == "RUNNING"
        assert monitor.seen("2").row is None
        assert asked[0] == ("1", "2")
        monitor.watch("3")
        # the listing under way did not ask for it
        assert monitor.seen("3") is None
        assert wait_until(lambda: monitor.seen("3")).row is None
    finally:
        monitor.close()
