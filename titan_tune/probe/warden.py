"""The supervisor of one launcher: whatever happens to the search, no process of the probe is left.

``python -I -S warden.py --parent PID --grace SECONDS --log FILE --exit-file FILE -- COMMAND...`` starts
COMMAND and ends it, with everything below it, when a line arrives on standard input, when standard input
closes or PID is no longer the parent (the search died, by SIGKILL even), and when COMMAND ends by itself.
torchrun gives every worker a session of its own, so process groups cannot do this; being a subreaper can:
orphans come back here.

Run by path and isolated, standard library only: it starts in tens of milliseconds, and nothing of the
environment can break it. The exit file holds ``returncode`` (COMMAND's, negative for a signal),
``asked`` (whether it was told to stop), ``killed`` (processes that needed SIGKILL) and ``left``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
UNKILLABLE_SECONDS = 60.0
"""How long to wait for killed processes: one in an uninterruptible driver call may take this long."""


def main(arguments: list[str]) -> int:
    """Run the command of ``arguments`` to its end; 0 if every process is gone."""
    options = parse(arguments)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signalled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signalled.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = start(options.command, Path(options.log))
    asked = wait_for_end(command, lambda: bool(signalled) or os.getppid() != options.parent)
    if command.poll() is None:
        command.send_signal(signal.SIGTERM)
        wait_for(command, options.grace)
    killed, left = kill_descendants(command)
    write_exit(
        Path(options.exit_file),
        {"returncode": command.returncode, "asked": asked, "killed": killed, "left": left},
    )
    return 1 if left else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warden")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--exit-file", required=True)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def prctl(option: int, value: int) -> None:
    """Linux's prctl, or OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output in ``log``; it is killed should the warden die first."""
    warden_pid = os.getpid()

    def die_with_warden() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden_pid:
            os.kill(os.getpid(), signal.SIGKILL)

    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_warden,
            env={**os.environ, "TITAN_TUNE_WARDEN_PID": str(warden_pid)},
        )


def wait_for_end(command: subprocess.Popen[bytes], must_stop: Callable[[], bool]) -> bool:
    """Wait until the command ends or is to be stopped; whether it is to be stopped."""
    while command.poll() is None:
        # a line or the end of the pipe: either way
        if must_stop() or select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            return True
        reap_orphans(command)
    return False


def wait_for(command: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait up to ``seconds`` for the command, reaping what it orphans."""
    deadline = time.monotonic() + seconds
    while command.poll() is None and time.monotonic() < deadline:
        reap_orphans(command)
        time.sleep(POLL_SECONDS)


def kill_descendants(command: subprocess.Popen[bytes]) -> tuple[int, list[int]]:
    """SIGKILL everything below this process until nothing is left: (how many, pids that would not die)."""
    killed: set[int] = set()
    deadline = time.monotonic() + UNKILLABLE_SECONDS
    while True:
        command.poll()
        reap_orphans(command)
        alive = descendants(os.getpid())
        if not alive or time.monotonic() > deadline:
            return len(killed), alive
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):  # gone, and reaped by its own parent
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(POLL_SECONDS)


def reap_orphans(command: subprocess.Popen[bytes]) -> None:
    """Collect dead children other than ``command``, whose status belongs to ``command.poll``."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid == command.pid:
            return
        os.waitpid(dead.si_pid, 0)


def descendants(root: int) -> list[int]:
    """Pids below ``root``, parents first; a zombie whose parent has yet to reap it does not count."""
    table = process_table()
    children = children_of(table)
    found: list[int] = []
    queue = list(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        queue.extend(children.get(pid, []))
        if table[pid][1] != "Z":
            found.append(pid)
    return found


def children_of(table: dict[int, tuple[int, str]]) -> dict[int, list[int]]:
    """Pids by parent."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    return children


def process_table() -> dict[int, tuple[int, str]]:
    """(parent pid, state letter) of every process."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the command name, in parentheses, may hold anything
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            table[int(entry.name)] = (int(parent), state)
    return table


def write_exit(path: Path, values: dict[str, object]) -> None:
    """Write the exit file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
