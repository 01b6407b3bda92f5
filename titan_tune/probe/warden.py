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
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.05
UNKILLABLE_SECONDS = 60.0
"""How long to wait for killed processes: one in an uninterruptible driver call may take this long."""


class Command(Protocol):
    """What is watched over: children of this process that begin and end together."""

    @property
    def pids(self) -> Collection[int]:
        """The children whose exit status belongs to ``poll``."""
        ...

    def poll(self) -> int | None:
        """The return code once all have ended, negative for a signal; else ``None``."""
        ...

    def terminate(self) -> None:
        """SIGTERM to those that run."""
        ...


class Program:
    """A command that is one program."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pids = (process.pid,)

    def poll(self) -> int | None:
        """Its return code once it has ended."""
        return self.process.poll()

    def terminate(self) -> None:
        """SIGTERM, unless it has ended."""
        self.process.terminate()


def main(arguments: list[str]) -> int:
    """Run the command of ``arguments`` to its end; 0 if every process is gone."""
    options = parse(arguments)
    must_stop = take_office(options.parent)
    command = Program(start(options.command, Path(options.log)))
    return supervise(
        command, must_stop, control=sys.stdin.fileno(), grace=options.grace, exit_file=Path(options.exit_file)
    )


def take_office(parent: int) -> Callable[[], bool]:
    """Become the reaper of everything below; the answer says whether SIGTERM came or ``parent`` has gone."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signalled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signalled.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return lambda: bool(signalled) or os.getppid() != parent


def supervise(
    command: Command,
    must_stop: Callable[[], bool],
    *,
    control: int,
    grace: float,
    exit_file: Path,
    when_ended: Callable[[], None] = lambda: None,
) -> int:
    """Watch ``command`` to its end, end all that is left, and write the exit file; 0 if all are gone.

    ``control`` is a file descriptor: what arrives on it, its end included, is the order to stop.
    ``when_ended`` is called before the exit file is written.
    """
    asked = wait_for_end(command, must_stop, control)
    if command.poll() is None:
        command.terminate()
        wait_for(command, grace)
    killed, left = kill_descendants(command)
    when_ended()
    write_exit(exit_file, {"returncode": command.poll(), "asked": asked, "killed": killed, "left": left})
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


def wait_for_end(command: Command, must_stop: Callable[[], bool], control: int) -> bool:
    """Wait until the command ends or is to be stopped; whether it is to be stopped."""
    while command.poll() is None:
        # a line or the end of the pipe: either way
        if must_stop() or select.select([control], [], [], POLL_SECONDS)[0]:
            return True
        reap_orphans(command)
    return False


def wait_for(command: Command, seconds: float) -> None:
    """Wait up to ``seconds`` for the command, reaping what it orphans."""
    deadline = time.monotonic() + seconds
    while command.poll() is None and time.monotonic() < deadline:
        reap_orphans(command)
        time.sleep(POLL_SECONDS)


def kill_descendants(command: Command) -> tuple[int, list[int]]:
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


def reap_orphans(command: Command) -> None:
    """Collect dead children other than the command's, whose status belongs to ``command.poll``."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid in command.pids:
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
