import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import fake_packages
import pytest
from probe_helpers import HERE, fake_command, processes_with, spec_in, wait_for_outcome, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe import files
from titan_tune.probe.local import LocalRunner
from titan_tune.probe.preload import launcher
from titan_tune.probe.preload.launcher import MAX_ZYGOTES, import_environment, torchrun_environment
from titan_tune.probe.preload.mark import VARIABLE
from titan_tune.titan.plugin.environment import PROBE_ID

ROOT = Path(files.__file__).parents[2]


@pytest.fixture
def packages(tmp_path):
    return fake_packages.write(tmp_path / "packages")


@pytest.fixture
def runner():
    # the command is what a probe falls back to
    with LocalRunner(
        2, "cpu", grace_seconds=0.3, command=fake_command(steps=10), launcher="preloaded"
    ) as runner:
        yield runner


def spec_of(directory, packages, *, steps=10, nproc=1, environment=(), settings=None, **then):
    variables = [
        ("PYTHONPATH", f"{packages}{os.pathsep}{ROOT}"),
        fake_packages.ranks(steps=steps, **then),
        ("OMP_NUM_THREADS", "1"),
        *environment,
    ]
    return spec_in(directory, nproc=nproc, environment=variables, **(settings or {}))


def zygote_of(runner):
    (zygote,) = runner._preloaded._zygotes.values()
    return zygote


def running(probe):
    """Once all of the probe's ranks have written their steps."""
    wait_until(lambda: probe.poll() or probe.progress().step)
    return probe


def test_a_probe_is_forked_and_measured(runner, packages, tmp_path):
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, packages, nproc=2)))
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert outcome.details["launcher"] == "preloaded"
    assert [memory.rank for memory in outcome.measurement.memory] == [0, 1]
    directory = tmp_path / "trial"
    record = json.loads((directory / "exit.json").read_text())
    assert record == {"returncode": 0, "asked": False, "killed": 0, "left": []}
    arguments = f"['--job.config_file', '{directory / 'config.toml'}']"
    lines = (directory / "stdout.log").read_text().splitlines()
    assert sorted(lines) == [f"[rank{rank}]:arguments {arguments}" for rank in (0, 1)]
    assert not (directory / files.LAUNCHER_LOGS).exists()


def test_probes_of_one_environment_share_a_zygote(runner, packages, tmp_path):
    pids = set()
    for name, devices in (("a", "0"), ("b", "1")):
        spec = spec_of(tmp_path / name, packages, environment=[("CUDA_VISIBLE_DEVICES", devices)])
        # the scenario is a variable too: the same for both
        assert wait_for_outcome(runner.start(spec)).status is ProbeStatus.COMPLETED
        pids.add(zygote_of(runner).process.pid)
    assert len(pids) == 1


def test_two_probes_run_at_the_same_time(runner, packages, tmp_path):
    probes = [
        running(runner.start(spec_of(tmp_path / name, packages, steps=3, r0="sleep"))) for name in ("a", "b")
    ]
    assert all(probe.poll() is None for probe in probes)
    assert len({probe._attempt.warden.pid for probe in probes}) == 2
    first = probes[0].cancel()
    assert first.status is ProbeStatus.CANCELLED
    assert probes[1].poll() is None
    assert len(processes_with(probes[1]._attempt.warden.probe_id)) == 2
    assert processes_with(probes[0]._attempt.warden.probe_id) == []


def test_a_rank_that_fails_takes_the_others_down(runner, packages, tmp_path):
    probe = runner.start(spec_of(tmp_path, packages, nproc=2, steps=3, r0="sleep", r1="fail"))
    outcome = wait_for_outcome(probe)
    assert (outcome.details["rank"], outcome.details["exitcode"]) == (1, 1)
    assert outcome.message == "ValueError: boom"
    assert processes_with(probe._attempt.warden.probe_id) == []


def test_a_killed_rank_is_told_from_one_that_failed(runner, packages, tmp_path):
    outcome = wait_for_outcome(
        runner.start(spec_of(tmp_path, packages, nproc=2, steps=3, r0="sleep", r1="kill"))
    )
    assert outcome.status is ProbeStatus.INFRASTRUCTURE
    assert (outcome.details["rank"], outcome.details["exitcode"]) == (1, -9)
    assert outcome.message == "a worker was killed from outside (SIGKILL)"
    log = (tmp_path / "trial" / "stdout.log").read_text().splitlines()
    assert "[rank1]:last words" in log
    assert "Root Cause (first observed failure):" in log


def test_ranks_that_ignore_sigterm_are_ended_with_their_children(runner, packages, tmp_path):
    probe = running(runner.start(spec_of(tmp_path, packages, nproc=2, steps=3, r0="stubborn", r1="stubborn")))
    probe_id = probe._attempt.warden.probe_id
    # the supervisor, two ranks, their children
    assert len(processes_with(probe_id)) == 5
    assert probe.cancel().status is ProbeStatus.CANCELLED
    assert probe._attempt.warden.exit_record()["killed"] == 4
    assert processes_with(probe_id) == []


def test_a_killed_supervisor_leaves_nothing_behind(runner, packages, tmp_path):
    probe = running(runner.start(spec_of(tmp_path, packages, steps=3, r0="stubborn")))
    probe_id = probe._attempt.warden.probe_id
    assert len(processes_with(probe_id)) == 3
    os.kill(probe._attempt.warden.pid, signal.SIGKILL)
    outcome = wait_for_outcome(probe)
    assert (outcome.status, outcome.message) == (
        ProbeStatus.INFRASTRUCTURE,
        "the probe's supervisor was killed",
    )
    assert processes_with(probe_id) == []


def test_a_killed_zygote_ends_its_probes_and_is_replaced(runner, packages, tmp_path):
    probe = running(runner.start(spec_of(tmp_path / "a", packages, steps=3, r0="stubborn")))
    zygote_of(runner).process.kill()
    assert wait_for_outcome(probe).status is ProbeStatus.INFRASTRUCTURE
    assert processes_with(probe._attempt.warden.probe_id) == []
    spec = spec_of(tmp_path / "b", packages, steps=3, r0="stubborn")
    probe = running(runner.start(spec))
    assert probe._attempt.warden.launcher == "preloaded"


HOST = """
import os, pathlib, sys, time
sys.path.insert(0, {here!r})
import fake_packages
from probe_helpers import spec_in
from titan_tune.probe.local import LocalRunner
runner = LocalRunner(1, "cpu", grace_seconds=0.3, launcher="preloaded")
variables = [("PYTHONPATH", {path!r}), fake_packages.ranks(steps=3, r0="stubborn")]
probe = runner.start(spec_in(pathlib.Path({directory!r}), environment=variables))
while True:
    probe.poll()
    time.sleep(0.05)
"""


def test_sigkill_of_the_search_leaves_no_process(packages, tmp_path):
    mark = f"SEARCH_TEST={uuid.uuid4().hex}"
    name, value = mark.split("=")
    path = f"{packages}{os.pathsep}{ROOT}"
    search = subprocess.Popen(
        [sys.executable, "-c", HOST.format(here=str(HERE), directory=str(tmp_path), path=path)],
        env={**os.environ, name: value, "PYTHONPATH": str(ROOT)},
    )
    # search, zygote, supervisor, rank and the rank's child
    wait_until(lambda: len(processes_with(mark)) >= 5)
    search.send_signal(signal.SIGKILL)
    search.wait()
    wait_until(lambda: processes_with(mark) == [])


NO_FORK = """
import errno, os
def none():
    raise OSError(errno.ENOSYS, "no fork here")
os.fork = none
"""
NO_PIDFD = """
import errno, os
def none(pid):
    raise OSError(errno.ENOSYS, "no pidfd here")
os.pidfd_open = none
"""
FORK_FAILS_ONCE = """
import errno, os
fork, calls, zygote = os.fork, [], os.getpid()
def sometimes():
    calls.append(None)
    if len(calls) == 3 and os.getpid() == zygote:  # after the trial before it is ready, and a first probe's
        raise BlockingIOError(errno.EAGAIN, "no more processes")
    return fork()
os.fork = sometimes
"""


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("triton.py", "raise ImportError('no driver')", "ImportError: no driver"),
        ("torch/_dynamo.py", "import torch\ntorch.cuda.is_initialized = lambda: True", "initialised CUDA"),
        ("torchao/float8.py", "import os\nos._exit(3)", "ended with code 3"),
        ("triton.py", NO_FORK, "OSError: [Errno 38] no fork here"),
        ("triton.py", NO_PIDFD, "OSError: [Errno 38] no pidfd here"),
    ],
)
def test_torchrun_starts_the_probe_where_no_zygote_can(runner, tmp_path, name, text, says):
    packages = fake_packages.write(tmp_path / "packages", **{name: text})
    for folder in ("a", "b"):
        outcome = wait_for_outcome(runner.start(spec_of(tmp_path / folder, packages)))
        assert outcome.status is ProbeStatus.COMPLETED, outcome
        assert outcome.details["launcher"].startswith("torchrun (")
        assert says in outcome.details["launcher"]
        said = (
            f"the preloaded launcher could not start this probe: it ran under {outcome.details['launcher']}"
        )
        assert outcome.warnings == (said,)
    assert len(runner._preloaded._zygotes) == 1  # and it is not tried again


def test_a_fork_that_fails_costs_neither_the_zygote_nor_its_other_probes(runner, tmp_path):
    packages = fake_packages.write(tmp_path / "packages", **{"triton.py": FORK_FAILS_ONCE})
    first = running(runner.start(spec_of(tmp_path / "a", packages, steps=3, r0="sleep")))
    # the scenario is part of the environment, and so of the zygote: the same for all three
    second = running(runner.start(spec_of(tmp_path / "b", packages, steps=3, r0="sleep")))
    assert second._attempt.warden.launcher == "torchrun (fork failed: [Errno 11] no more processes)"
    third = running(runner.start(spec_of(tmp_path / "c", packages, steps=3, r0="sleep")))
    assert third._attempt.warden.launcher == "preloaded"
    assert first.poll() is None
    assert len(runner._preloaded._zygotes) == 1


def test_torchrun_starts_the_probe_where_no_process_can_be_had(packages, tmp_path, monkeypatch):
    def none(environment):
        raise OSError(12, "no memory for it")

    monkeypatch.setattr(launcher, "Zygote", none)
    with LocalRunner(1, "cpu", grace_seconds=0.3, command=fake_command(steps=10)) as runner:
        outcome = wait_for_outcome(runner.start(spec_of(tmp_path, packages)))
    assert outcome.status is ProbeStatus.COMPLETED, outcome
    assert outcome.details["launcher"] == "torchrun (no preloading process: [Errno 12] no memory for it)"
    assert len(outcome.warnings) == 1


def test_a_probe_that_is_cancelled_while_the_zygote_imports_never_begins(runner, tmp_path):
    packages = fake_packages.write(
        tmp_path / "packages", **{"triton.py": "import time\ntime.sleep(2)", "torch/_dynamo.py": ""}
    )
    first = runner.start(spec_of(tmp_path / "a", packages))
    assert first.cancel().status is ProbeStatus.CANCELLED
    second = wait_for_outcome(runner.start(spec_of(tmp_path / "b", packages)))
    assert (second.status, second.details["launcher"]) == (ProbeStatus.COMPLETED, "preloaded"), second
    assert not (tmp_path / "a" / "trial" / "stdout.log").exists()
    assert zygote_of(runner).skipped == {first._attempt.warden.probe_id}


def test_an_environment_that_is_too_long_for_a_message_goes_to_torchrun(runner, packages, tmp_path):
    long = [("LONG", "x" * 100_000), ("LONGER", "y" * 100_000)]
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, packages, environment=long)))
    assert outcome.status is ProbeStatus.COMPLETED
    assert "too long" in outcome.details["launcher"]


def test_zygotes_are_few_and_the_idle_ones_make_room(runner, packages, tmp_path):
    def probe_in(variable, **then):
        spec = spec_of(tmp_path / variable, packages, steps=3, environment=[("MINE", variable)], **then)
        return runner.start(spec)

    assert MAX_ZYGOTES == 3
    busy = [running(probe_in(variable, r0="sleep")) for variable in ("a", "b")]
    idle = probe_in("c", r0="fail")
    wait_for_outcome(idle)
    zygotes = set(runner._preloaded._zygotes.values())
    running(probe_in("d", r0="sleep"))
    left = zygotes - set(runner._preloaded._zygotes.values())
    assert len(left) == 1
    assert left.pop().process.returncode is not None
    assert all(probe.poll() is None for probe in busy)
    # every zygote is busy now
    outcome = wait_for_outcome(probe_in("e"))
    assert outcome.details["launcher"] == "torchrun (3 preloading processes are busy)"
    assert outcome.status is ProbeStatus.COMPLETED


def test_a_zygote_that_never_gets_ready_is_given_up(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "IMPORT_SECONDS", 0.5)
    packages = fake_packages.write(tmp_path / "packages", **{"triton.py": "import time\ntime.sleep(10000)"})
    outcome = wait_for_outcome(runner.start(spec_of(tmp_path, packages)))
    assert outcome.status is ProbeStatus.COMPLETED
    assert "not ready within" in outcome.details["launcher"]


@pytest.mark.parametrize(
    ("settings", "used"),
    [({}, "preloaded"), ({"launcher": "preloaded"}, "preloaded"), ({"launcher": "torchrun"}, "torchrun")],
)
def test_the_space_files_setting_chooses_the_launcher(packages, tmp_path, settings, used):
    with LocalRunner(1, "cpu", grace_seconds=0.3, command=fake_command(steps=10)) as runner:
        outcome = wait_for_outcome(runner.start(spec_of(tmp_path, packages, settings=settings)))
    assert (outcome.details["launcher"], outcome.warnings) == (used, ())


def test_what_a_zygote_must_have_in_common_with_a_probe():
    shared = {"PYTORCH_ALLOC_CONF": "a", "TORCHINDUCTOR_CACHE_DIR": "b"}
    late = {"TITAN_TUNE_METRICS_DIR": "c", "CUDA_VISIBLE_DEVICES": "0", "NGPU": "8"}
    assert import_environment({**shared, **late}) == shared
    # torchtitan picks its device type when it is imported
    assert import_environment({"CUDA_VISIBLE_DEVICES": ""}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_several_ranks_get_one_thread_each_unless_told_otherwise():
    assert torchrun_environment({}, 2) == {"OMP_NUM_THREADS": "1"}
    assert torchrun_environment({}, 1) == {}
    assert torchrun_environment({"OMP_NUM_THREADS": "4"}, 2) == {"OMP_NUM_THREADS": "4"}


def test_the_mark_is_the_plug_ins():
    assert VARIABLE == PROBE_ID
