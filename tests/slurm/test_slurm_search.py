"""The whole search through a real Slurm, its ranks scripted."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_helpers import FAKE_PYTHON, wait_until

from titan_tune.probe.record import read_outcome

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]

SPACE = """
[base.model]
name = "llama3"
flavor = "tiny"
[base.titan_tune]
data = "synthetic"
[base.titan_tune.model_args]
dim = 64
n_layers = 2
n_heads = 4
vocab_size = 512
[base.training]
seq_len = 64
local_batch_size = 2
steps = 50
[base.lr_scheduler]
warmup_steps = 2
[cluster]
gpu = "cpu"
num_nodes = 2
gpus_per_node = 1
[axes]
activation_checkpoint = ["selective-2", "none", "full"]
parallelism = [{{ dp_shard = 2 }}, {{ dp_replicate = 2 }}]
[budget]
max_probes = 7
[probe]
steps = 10
warmup_steps = 2
finalists = 1
retries = 0
[slurm]
python = "{python}"
cache_directory = "{folder}/cache"
setup = ['''{setup}''']
"""


class Started:
    """The command, with its output in a file."""

    def __init__(self, folder, environ, scenario, *more):
        setup = f"export FAKE_SCENARIO={shlex.quote(json.dumps(scenario))}"
        (folder / "space.toml").write_text(SPACE.format(python=FAKE_PYTHON, folder=folder, setup=setup))
        command = [sys.executable, "-m", "titan_tune", "search", "space.toml", "--study", "s"]
        command += ["--runner", "slurm", "--parallel", "3", *more]
        self.log = folder / f"search{len(list(folder.glob('search*')))}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip

    def ended(self, code):
        assert self.process.wait(200) == code, self.log.read_text()


@pytest.fixture
def search(slurm):
    """Start the command, its ranks following a scenario; what a failed test leaves of it is killed."""
    started = []

    def start(scenario, *more):
        started.append(Started(slurm.directory, slurm.environ, scenario, *more))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def trials(slurm):
    return [folder.parent for folder in (slurm.directory / "runs" / "s" / "trials").glob("*/job.json")]


def jobs_of_the_study(slurm):
    """(start, end) of every job that was ever submitted."""
    out = slurm.slurm.run("squeue", "-h", "-t", "all", "-o", "%j|%S|%e").stdout
    rows = [line.split("|") for line in out.splitlines() if line.startswith("tt-s-")]
    names = {json.loads((trial / "job.json").read_text())["name"] for trial in trials(slurm)}
    return [(start, end) for name, start, end in rows if name in names]


def test_three_jobs_at_a_time(slurm, search):
    search({"then": "pause"}).ended(0)
    outcomes = [read_outcome(trial) for trial in trials(slurm)]
    assert len(outcomes) == 7
    assert {(str(outcome.status), outcome.attempts) for outcome in outcomes} == {("completed", 1)}
    ran = jobs_of_the_study(slurm)
    assert len(ran) == 7
    assert max(sum(start <= at < end for start, end in ran) for at, _ in ran) in (2, 3)
    check_export(slurm)


def check_export(slurm):
    """What is exported as a batch script runs on the cluster that was searched."""
    environ = {**slurm.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "titan_tune", "export", "s", "--format", "sbatch", "-o", "job.sh"]
    subprocess.run(command, cwd=slurm.directory, env=environ, check=True, capture_output=True)
    job = slurm.slurm.run("sbatch", "--parsable", str(slurm.directory / "job.sh")).stdout.strip()
    state = ("squeue", "-h", "-t", "all", "-j", job, "-o", "%T|%D")
    wait_until(lambda: slurm.slurm.run(*state).stdout.strip() in ("COMPLETED|2", "FAILED|2"))
    logs = "".join(path.read_text() for path in slurm.directory.glob("*.log"))
    assert slurm.slurm.run(*state).stdout.strip() == "COMPLETED|2", logs


def test_a_search_that_is_killed_finds_its_jobs_again(slurm, search, fault_row):
    go = slurm.directory / "go"
    scenario = {"then": "wait", "file": str(go)}
    first = search(scenario)
    wait_until(lambda: trials(slurm) and slurm.slurm.live_jobs(), seconds=90)
    first.process.kill()
    first.ended(-signal.SIGKILL)
    (left,) = trials(slurm)
    assert read_outcome(left) is None
    go.touch()
    search(scenario).ended(0)
    outcomes = [read_outcome(trial) for trial in trials(slurm)]
    assert {(str(outcome.status), outcome.attempts) for outcome in outcomes} == {("completed", 1)}
    assert len(outcomes) == len(jobs_of_the_study(slurm)) == 7
    fault_row(
        "Slurm",
        "Search killed (SIGKILL) with a job in the queue, and started again",
        "completed: each of 7 probes once",
        "the job was found again; none was submitted twice",
    )


def test_an_interrupted_search_leaves_its_jobs_or_cancels_them(slurm, search):
    scenario = {"steps": 3, "then": "sleep"}
    leaves = search(scenario, "--on-interrupt", "leave")
    wait_until(lambda: trials(slurm) and slurm.slurm.live_jobs(), seconds=90)
    leaves.process.send_signal(signal.SIGINT)
    leaves.ended(130)
    (job,) = slurm.slurm.live_jobs()
    (trial,) = trials(slurm)
    cancels = search(scenario, "--on-interrupt", "cancel")
    wait_until(lambda: "stage: baseline" in cancels.log.read_text(), seconds=90)
    cancels.process.send_signal(signal.SIGINT)
    cancels.ended(130)
    assert slurm.slurm.live_jobs() == []
    outcome = read_outcome(trial)
    assert (str(outcome.status), outcome.details["job_id"]) == ("cancelled", job)
    assert trials(slurm) == [trial]
