"""The warden seen from the search: start it, ask it to stop, and find what is left should it be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_tune.probe import files, warden
from titan_tune.titan.plugin.environment import PROBE_ID


class Launched(Protocol):
    """One attempt of a probe: its processes, under a warden."""

    probe_id: str

    @property
    def launcher(self) -> str:
        """What started it, for the record."""
        ...

    def ask_to_stop(self) -> None:
        """Begin the orderly end; returns at once."""
        ...

    def has_ended(self) -> bool:
        """Whether every process is gone; never blocks long."""
        ...

    def wait(self) -> None:
        """Block until every process is gone."""
        ...

    def exit_record(self) -> dict[str, Any] | None:
        """What the warden wrote; ``None`` where it was killed or there was none."""
        ...


@dataclass(slots=True)
class WardenProcess:
    """A launcher under its warden."""

    process: subprocess.Popen[bytes]
    directory: Path
    probe_id: str
    launcher: str = "torchrun"

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        *,
        probe_id: str,
        grace_seconds: float,
    ) -> WardenProcess:
        """Start ``command`` under a new warden; its output goes to ``directory/stdout.log``."""
        arguments = [
            sys.executable, "-I", "-S", str(Path(warden.__file__).resolve()),
            "--parent", str(os.getpid()), "--grace", str(grace_seconds),
            "--log", str(directory / files.LOG), "--exit-file", str(directory / files.EXIT),
            "--", *command,
        ]  # fmt: skip
        with (directory / files.LOG).open("ab") as log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is the search's to handle
            )
        return cls(process, directory, probe_id)

    def ask_to_stop(self) -> None:
        """Begin the orderly end; returns at once."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def has_ended(self) -> bool:
        """Whether the warden has ended; kills what it left if it was itself killed."""
        if self.process.poll() is None:
            return False
        self.ask_to_stop()
        if self.exit_record() is None:
            kill_marked(self.probe_id)
        return True

    def wait(self) -> None:
        """Block until every process is gone."""
        self.process.wait()
        self.has_ended()

    def exit_record(self) -> dict[str, Any] | None:
        """What the warden wrote; ``None`` where it was killed."""
        return exit_record(self.directory)


def exit_record(directory: Path) -> dict[str, Any] | None:
    """The exit file of a trial folder; ``None`` where there is none."""
    path = directory / files.EXIT
    return json.loads(path.read_text()) if path.exists() else None


def kill_marked(probe_id: str, *, seconds: float = 30.0) -> int:
    """SIGKILL every process that carries ``probe_id`` in its environment; how many.

    Signals go through pidfds, so that a pid which is used again cannot be hit. Waits until they are gone.
    """
    deadline = time.monotonic() + seconds
    killed = 0
    while time.monotonic() < deadline:
        found = list(marked_processes(probe_id))
        if not found:
            break
        for descriptor in found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                killed += 1
        for descriptor in found:
            is_readable(descriptor, max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
    return killed


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or a pidfd's process has ended, within ``seconds``. Unlike
    ``select.select`` it takes descriptors beyond 1023."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000.0 * seconds))


def marked_processes(probe_id: str) -> Iterator[int]:
    """A pidfd of each process of this user whose environment marks it as part of the probe."""
    mark = f"{PROBE_ID}={probe_id}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            descriptor = os.pidfd_open(int(entry.name))
            # read after the open: the descriptor and the environment are then of one process
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
        if marked:
            yield descriptor
        else:
            os.close(descriptor)


def host_oom_kills() -> int:
    """How many processes the kernel has killed for memory, here: in this process's control group, which its probes
    share, or on the whole machine where the group does not say."""
    for path in (*_own_group_counters(Path("/proc/self/cgroup").read_text()), Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _own_group_counters(cgroup: str) -> list[Path]:
    """Files that count kills, of the groups in ``/proc/self/cgroup``: version 1's memory controller, version 2."""
    found = []
    for line in cgroup.splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(Path(f"/sys/fs/cgroup/memory{group}/memory.oom_control"))
        elif not controllers:
            found.append(Path(f"/sys/fs/cgroup{group}/memory.events"))
    return found
