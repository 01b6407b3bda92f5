"""What a preloaded probe must have in common with one that torchrun starts: everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from probe_helpers import wait_for_outcome
from test_local_torchtitan import probe_of

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe import files
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.preload.launcher import LATE_PREFIXES, LATE_VARIABLES, import_environment
from titan_tune.probe.preload.ranks import rank_environment

pytestmark = [pytest.mark.torchtitan, pytest.mark.timeout(1200)]

ROOT = Path(files.__file__).parents[2]
COMPILE_LOSS = '[compile]\nenable = true\ncomponents = ["loss"]\n'
OWN = {"TITAN_TUNE_METRICS_DIR", "TITAN_TUNE_CACHE_DIR", "TITAN_TUNE_PROBE_ID"}
OF_THE_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TITAN_TUNE_WARDEN_PID"}


@pytest.fixture(scope="module")
def runners():
    with (
        LocalRunner(2, "cpu", grace_seconds=3, launcher="torchrun") as cold,
        LocalRunner(2, "cpu", grace_seconds=3, launcher="preloaded") as warm,
    ):
        yield cold, warm


def both(runners, directory, *, nproc=2, settings=None, **job):
    """(outcome, trial folder) of the same probe, started by torchrun and preloaded."""
    found = []
    settings = {"startup_seconds": 500, **(settings or {})}
    for name, runner in zip(("cold", "warm"), runners, strict=True):
        probe = probe_of(runner, directory / name, nproc=nproc, settings=settings, **job)
        outcome = wait_for_outcome(probe, seconds=550)
        found.append((outcome, directory / name / "trial"))
    assert [outcome.details["launcher"] for outcome, _ in found] == ["torchrun", "preloaded"]
    return found


def records(directory):
    metrics = files.Metrics(directory)
    metrics.read_new()
    return metrics.logs


def test_the_same_numbers_and_the_same_files(runners, tmp_path):
    cold, warm = both(runners, tmp_path, steps=5, more=COMPILE_LOSS, custom_import="describe_process")
    for outcome, _ in (cold, warm):
        assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert cold[0].measurement.losses == warm[0].measurement.losses
    assert cold[0].measurement.measured_steps == warm[0].measurement.measured_steps
    assert cold[0].message == warm[0].message
    assert {p.name for p in cold[1].iterdir()} == {p.name for p in warm[1].iterdir()}
    for rank, log in records(cold[1]).items():
        other = records(warm[1])[rank]
        assert log.header.keys() == other.header.keys()
        assert [r.grad_norm for r in log.steps] == [r.grad_norm for r in other.steps]
        timings = {"compile_seconds"}
        assert {k: v for k, v in log.compiler.items() if k not in timings} == {
            k: v for k, v in other.compiler.items() if k not in timings
        }
        assert log.compiler["captured_graphs"] > 0
        process, other_process = (
            json.loads((folder / f"process.rank{rank}.json").read_text()) for folder in (cold[1], warm[1])
        )
        same_process(process, other_process)


def same_process(cold, warm):
    """All that torchtitan can see of its process, but for what names one launch."""
    of_cold, of_warm = cold.pop("environment"), warm.pop("environment")
    assert of_cold.keys() ^ of_warm.keys() == {"TITAN_TUNE_WARDEN_PID"}
    differ = {name for name in of_cold.keys() & of_warm.keys() if of_cold[name] != of_warm[name]}
    assert differ <= OWN | OF_THE_LAUNCH | {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    for chance in ("random", "torch_seed"):
        assert cold.pop(chance) != warm.pop(chance)
    assert [argv.pop() for argv in (cold["argv"], warm["argv"])] == [
        f"{values['TITAN_TUNE_METRICS_DIR']}/config.toml" for values in (of_cold, of_warm)
    ]
    assert cold == warm


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ({"model": 'converters = ["float8"]', "nproc": 1}, ProbeStatus.UNSUPPORTED),
        ({"custom_import": "fault_oom"}, ProbeStatus.OOM),
        ({"custom_import": "fault_die"}, ProbeStatus.INFRASTRUCTURE),
        ({"custom_import": "fault_hang", "settings": {"hang_seconds": 3}}, ProbeStatus.HANG),
    ],
    ids=["refused", "oom", "sigkill", "hang"],
)
def test_the_same_judgement(runners, tmp_path, job, status):
    cold, warm = both(runners, tmp_path, **{"steps": 6, **job})
    assert cold[0].status is status, cold[0]
    assert (warm[0].status, warm[0].message) == (cold[0].status, cold[0].message)
    timed = {"launcher", "phases", "trend", "compiler"}
    assert {k: v for k, v in warm[0].details.items() if k not in timed} == {
        k: v for k, v in cold[0].details.items() if k not in timed
    }


SPY = """
import os, sys
read = set()
original = type(os.environ).__getitem__
type(os.environ).__getitem__ = lambda self, name: (read.add(name), original(self, name))[1]
from titan_tune.probe.preload import imports
imports.preload()
sys.stderr.flush()
print("READ", *sorted(read))
print("LEFT", *sorted(name for name in sys.modules if name.startswith(("torchtitan.train", "titan_tune.titan"))))
print("CUDA", imports.cuda_is_initialised())
"""


def test_nothing_reads_at_import_what_a_rank_is_told_later():
    # the environment a zygote gets: copies of it read every name, and CI tells the tests a TITAN_TUNE_ of its own
    environment = import_environment(os.environ)
    result = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    said = {name: words for name, *words in map(str.split, result.stdout.splitlines()) if name.isupper()}
    assert len(said["READ"]) > 100  # the spy works
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" in said["READ"]
    told = rank_environment({}, rank=0, num_ranks=1, port=1, run_id="", error_file=Path("e"))
    late = {*told, *LATE_VARIABLES} - {"CUDA_VISIBLE_DEVICES"}  # read where there are GPUs, to count them
    assert not late & set(said["READ"])
    assert not [name for name in said["READ"] if name.startswith(LATE_PREFIXES)]
    # the plug-in arms itself at its first import, and ``__main__`` is to be the first copy of the trainer
    assert said["LEFT"] == []
    assert said["CUDA"] == ["False"]


def test_a_forked_rank_has_nothing_to_import(runners, tmp_path):
    _, warm = runners
    first, second = (
        wait_for_outcome(probe_of(warm, tmp_path / name, nproc=2), seconds=550) for name in ("a", "b")
    )
    assert (first.details["launcher"], second.details["launcher"]) == ("preloaded", "preloaded")
    assert list(second.details["phases"]) == [
        "launch", "imports", "init", "first_step", "steps", "shutdown", "compile"
    ]  # fmt: skip
    assert set(second.details["trend"]) >= {"step_jitter", "recompilations", "fused_collective_matmuls"}
