"""Probes as steps of an allocation of a real Slurm."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from slurm_helpers import HERE, processes_in, wait_until

from titan_tune.probe.slurm.steps import Allocation

pytestmark = pytest.mark.slurm


def search(slurm, probes, *options, after=""):
    """Start a search in a batch job; its answer, read when the job has ended, is called for."""
    path = f"{HERE}:{Path(__file__).parents[2]}"
    script = Path(HERE / "search_in_allocation.py")
    words = [
        "env",
        f"PYTHONPATH={path}",
        sys.executable,
        str(script),
        str(slurm.directory),
        json.dumps(probes),
    ]
    log = slurm.directory / "search.log"
    submit = ["sbatch", "--parsable", f"--output={log}", *options, "--wrap", shlex.join(words) + after]
    job = slurm.slurm.run(*submit).stdout.strip()

    def answer():
        wait_until(lambda: slurm.slurm.live_jobs() == [], seconds=60)
        assert (slurm.directory / "answer.json").exists(), log.read_text()
        return json.loads((slurm.directory / "answer.json").read_text())

    return job, answer


def process_of_the_search(directory):
    """Its own pid is one of its node's namespace."""
    words = [b"search_in_allocation.py", str(directory).encode()]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            line = (entry / "cmdline").read_bytes().split(b"\0")
            if line[0].endswith(b"python") and all(any(word in part for part in line) for word in words):
                return int(entry.name)
    raise AssertionError("no search is running")


def meeting(slurm):
    (slurm.directory / "met").mkdir()
    return {"then": "meet", "folder": str(slurm.directory / "met")}


def test_two_steps_run_side_by_side_on_their_own_nodes(slurm):
    scenario = meeting(slurm)
    probes = [{"name": name, "nodes": 2, "nproc": 1, "scenario": scenario} for name in ("one", "two")]
    _, answer = search(slurm, probes, "-N4", "--ntasks-per-node=1", "--cpus-per-task=2")
    assert answer()["statuses"] == ["completed", "completed"], answer()
    assert answer()["slots"] == 2
    logs = [(slurm.directory / name / "stdout.log").read_text() for name in ("one", "two")]
    nodes = [
        {line.removeprefix("on ") for line in log.splitlines() if line.startswith("on ")} for log in logs
    ]
    assert [len(used) for used in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]


def test_two_steps_share_a_node_and_not_its_gpus(slurm):
    scenario = meeting(slurm)
    probes = [{"name": name, "nodes": 1, "nproc": 4, "scenario": scenario} for name in ("one", "two")]
    _, answer = search(slurm, probes, "-N1", "--ntasks-per-node=1", "--cpus-per-task=8", "--gpus-per-node=8")
    assert answer()["statuses"] == ["completed", "completed"], answer()
    assert answer()["slots"] == 2
    seen = [
        json.loads((slurm.directory / name / "seen.json").read_text())["environment"]
        for name in ("one", "two")
    ]
    gpus = [set(environment["CUDA_VISIBLE_DEVICES"].split(",")) for environment in seen]
    assert [len(used) for used in gpus] == [4, 4]
    assert not gpus[0] & gpus[1]


def test_a_step_that_hangs_is_cancelled_alone(slurm):
    go = slurm.directory / "go"
    probes = [
        {"name": "hangs", "nodes": 1, "nproc": 1, "scenario": {"steps": 3, "then": "sleep"}},
        {"name": "waits", "nodes": 1, "nproc": 1, "scenario": {"then": "wait", "file": str(go)}},
    ]
    _, answer = search(slurm, probes, "-N2", "--ntasks-per-node=1")
    outcome = slurm.directory / "hangs" / "outcome.json"
    wait_until(outcome.exists, seconds=60)
    assert processes_in(slurm.directory / "hangs") == []
    assert processes_in(slurm.directory / "waits") != []
    go.touch()
    assert answer()["statuses"] == ["hang", "completed"]


def test_a_search_that_is_killed_leaves_no_step(slurm, fault_row):
    probes = [
        {
            "name": "left",
            "nodes": 2,
            "nproc": 1,
            "scenario": {"steps": 3, "then": "sleep"},
            "hang_seconds": 900,
        }
    ]
    job, _ = search(slurm, probes, "-N2", "--ntasks-per-node=1", after="; sleep 1000")
    trial = slurm.directory / "left"
    wait_until((trial / "metrics.rank1.jsonl").exists, seconds=60)
    os.kill(process_of_the_search(slurm.directory), signal.SIGKILL)
    wait_until(lambda: processes_in(trial) == [])
    steps = slurm.slurm.run("squeue", "-h", "-s", "-j", job, "-o", "%j").stdout.split()
    assert [name for name in steps if name.startswith("tt-")] == []
    slurm.slurm.run("scancel", job)
    wait_until(lambda: slurm.slurm.live_jobs() == [])
    fault_row(
        "Slurm",
        "Search killed (SIGKILL) inside its allocation",
        "nothing",
        "its step ends; the allocation stays",
    )


def test_an_allocation_is_read_from_slurms_variables():
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_CPUS_PER_NODE": "96(x2),64",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_MEM_PER_NODE": "1000000",
    }
    allocation = Allocation.read(environ, ("a", "b", "c"))
    assert allocation == Allocation("7", ("a", "b", "c"), 64, 8, 1000000)
    assert allocation.slots("cuda", num_nodes=1, ranks_per_node=8) == 3
    assert allocation.slots("cuda", num_nodes=1, ranks_per_node=4) == 6
    assert allocation.slots("cuda", num_nodes=2, ranks_per_node=8) == 1
    assert allocation.slots("cuda", num_nodes=4, ranks_per_node=8) == 0
    assert allocation.slots("cuda", num_nodes=1, ranks_per_node=16) == 0
