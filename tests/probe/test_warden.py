import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from probe_helpers import processes_with, wait_until

from titan_tune.probe import processes, warden

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "10000"], start_new_session=True)
print("ready", flush=True)
time.sleep(10000)
"""

DAEMON = """
import subprocess, sys
subprocess.Popen(["sleep", "10000"], start_new_session=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def mark():
    return f"WARDEN_TEST={uuid.uuid4().hex}"


def start(directory, mark, *command, grace=0.3):
    name, value = mark.split("=")
    return subprocess.Popen(
        [
            sys.executable, "-I", "-S", warden.__file__, "--parent", str(os.getpid()), "--grace", str(grace),
            "--log", str(directory / "log"), "--exit-file", str(directory / "exit.json"), "--", *command,
        ],
        stdin=subprocess.PIPE,
        env={**os.environ, name: value},
    )  # fmt: skip


def exit_record(directory):
    return json.loads((directory / "exit.json").read_text())


def ready(directory):
    return wait_until(lambda: (directory / "log").exists() and "ready" in (directory / "log").read_text())


@pytest.mark.parametrize("code", [0, 7])
def test_the_commands_code_is_recorded_and_its_orphans_are_ended(tmp_path, mark, code):
    process = start(tmp_path, mark, sys.executable, "-c", DAEMON, str(code))
    assert process.wait(30) == 0
    assert exit_record(tmp_path) == {"returncode": code, "asked": False, "killed": 1, "left": []}
    assert processes_with(mark) == []


def test_output_of_both_kinds_goes_to_the_log(tmp_path, mark):
    start(tmp_path, mark, "sh", "-c", "echo out; echo err >&2").wait(30)
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


@pytest.mark.parametrize("how", ["line", "end"])
def test_a_line_or_the_end_of_input_ends_even_what_ignores_sigterm(tmp_path, mark, how):
    process = start(tmp_path, mark, sys.executable, "-c", STUBBORN)
    ready(tmp_path)
    if how == "line":
        process.stdin.write(b"stop\n")
        process.stdin.flush()
    else:
        process.stdin.close()
    assert process.wait(30) == 0
    record = exit_record(tmp_path)
    assert (record["returncode"], record["asked"], record["killed"]) == (-9, True, 2)
    assert processes_with(mark) == []


def test_sigterm_is_enough_for_what_heeds_it(tmp_path, mark):
    process = start(tmp_path, mark, "sleep", "10000", grace=20)
    process.stdin.close()
    assert process.wait(15) == 0
    assert exit_record(tmp_path) == {"returncode": -15, "asked": True, "killed": 0, "left": []}


def test_a_killed_warden_takes_its_command_along(tmp_path, mark):
    process = start(tmp_path, mark, "sleep", "10000")
    wait_until(lambda: len(processes_with(mark)) == 2)
    process.kill()
    process.wait(30)
    wait_until(lambda: processes_with(mark) == [])


def test_a_command_that_does_not_exist_leaves_no_exit_record(tmp_path, mark):
    assert start(tmp_path, mark, "/no/such/command").wait(30) != 0
    assert not (tmp_path / "exit.json").exists()


def test_the_process_table_knows_this_process_and_its_child():
    child = subprocess.Popen(["sleep", "10000"])
    try:
        assert warden.process_table()[child.pid][0] == os.getpid()
        assert child.pid in warden.descendants(os.getpid())
    finally:
        child.kill()
    # a zombie is no descendant to kill
    wait_until(lambda: child.pid not in warden.descendants(os.getpid()))
    child.wait()


def test_the_warden_needs_nothing_but_the_standard_library():
    source = Path(warden.__file__).read_text()
    imported = {
        line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    }
    assert imported - set(sys.stdlib_module_names) == set()


def test_oom_kills_are_those_of_the_own_group():
    version_1 = processes._own_group_counters("4:memory:/job/7\n3:cpuset:/\n0::/\n")
    assert version_1 == [
        Path("/sys/fs/cgroup/memory/job/7/memory.oom_control"),
        Path("/sys/fs/cgroup/memory.events"),
    ]
    assert processes._own_group_counters("0::/user.slice/a:b\n") == [
        Path("/sys/fs/cgroup/user.slice/a:b/memory.events")
    ]
    assert processes.host_oom_kills() >= 0
