"""The search's side: which zygote serves a probe, and the handle of a probe that a zygote started.

A probe is started from a zygote whose environment equals the probe's but for variables that nothing reads
while it imports. Where a zygote cannot start or cannot serve, torchrun starts the probe.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from titan_tune.probe import files, processes
from titan_tune.probe.preload.mark import VARIABLE
from titan_tune.probe.preload.messages import Request, receive, send_request
from titan_tune.probe.processes import Launched, WardenProcess, is_readable

MAX_ZYGOTES: Final = 3
"""Environments that are served at once; each holds about 0.6 GB of memory, most of it shared with its probes."""

WAIT_SECONDS: Final = 0.2
IMPORT_SECONDS: Final = 600.0
"""How long a zygote may import: a file system that hangs must not cost a search all its probes."""

LATE_VARIABLES: Final = frozenset({"NGPU", "CUDA_VISIBLE_DEVICES"})
LATE_PREFIXES: Final = ("TITAN_TUNE_",)
"""What nothing reads while it imports: probes that differ in these alone share a zygote."""

NO_DEVICES: Final = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU: torchtitan picks its device type at import."""


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of a probe's environment that must be a zygote's own."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in LATE_VARIABLES and not name.startswith(LATE_PREFIXES)
    }
    if environment.get("CUDA_VISIBLE_DEVICES") in NO_DEVICES:
        kept["CUDA_VISIBLE_DEVICES"] = environment["CUDA_VISIBLE_DEVICES"]
    return kept


def torchrun_environment(environment: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """``environment`` as torchrun hands it on: several ranks get one OpenMP thread each unless told otherwise."""
    return {**({"OMP_NUM_THREADS": "1"} if num_ranks > 1 else {}), **environment}


class PreloadedLauncher:
    """Starts probes from zygotes. ``close`` ends the zygotes, and with them what still runs."""

    def __init__(self) -> None:
        self._zygotes: dict[frozenset[tuple[str, str]], Zygote] = {}

    def start(
        self,
        arguments: Sequence[str],
        num_ranks: int,
        directory: Path,
        environment: Mapping[str, str],
        *,
        probe_id: str,
        grace_seconds: float,
        cold: Callable[[], WardenProcess],
    ) -> Launched:
        """Start ``torchtitan.train ARGUMENTS`` in ``num_ranks`` processes; see ``WardenProcess.start``.

        Returns at once, also while the zygote is still importing. ``cold`` starts the probe without one.
        """
        whole = torchrun_environment(environment, num_ranks)
        try:
            zygote = self._zygote(import_environment(whole))
        except OSError as error:  # no process, memory or descriptor to be had
            return _instead(cold, f"no preloading process: {error}")
        if zygote is None:
            return _instead(cold, f"{MAX_ZYGOTES} preloading processes are busy")
        request = Request(
            probe_id=probe_id,
            num_ranks=num_ranks,
            environment=whole,
            arguments=tuple(arguments),
            log=str(directory / files.LOG),
            exit_file=str(directory / files.EXIT),
            rank_directory=str(directory / files.LAUNCHER_LOGS),
            grace_seconds=grace_seconds,
        )
        return ForkedProbe(zygote, request, directory, cold)

    def close(self) -> None:
        """End every zygote."""
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes = {}

    def _zygote(self, environment: Mapping[str, str]) -> Zygote | None:
        """One for this environment; ``None`` where there are too many that are busy."""
        key = frozenset(environment.items()) | {("cwd", str(Path.cwd()))}
        if key in self._zygotes:
            # a zygote that once failed to start would fail again
            found = self._zygotes.pop(key)
            found.read()
            if found.failure is None or not found.was_ready:
                self._zygotes[key] = found
                return found
            found.close()
        if len(self._zygotes) >= MAX_ZYGOTES:
            idle = next((k for k, zygote in self._zygotes.items() if not zygote.is_busy()), None)
            if idle is None:
                return None
            self._zygotes.pop(idle).close()
        self._zygotes[key] = zygote = Zygote(environment)
        return zygote


def _instead(cold: Callable[[], WardenProcess], why: str) -> WardenProcess:
    """A start by torchrun that says why."""
    launched = cold()
    launched.launcher = f"torchrun ({why})"
    return launched


class Zygote:
    """One zygote process, seen from the search."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.failure: str | None = None
        """Why it serves no more."""
        self.was_ready = False
        self.import_seconds: dict[str, float] = {}
        self.started: dict[str, tuple[int, int]] = {}
        """(pid, pidfd) of supervisors by probe, until the probe's handle takes them."""
        self.skipped: set[str] = set()
        """Probes that were cancelled before they began."""
        self.refused: dict[str, str] = {}
        """Why a probe could not be forked, until the probe's handle takes it."""
        self.running: set[str] = set()
        self.mark = uuid.uuid4().hex
        self._began = time.monotonic()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the zygote
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "titan_tune.probe.preload.zygote", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**environment, VARIABLE: self.mark},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the search's to handle
            )  # fmt: skip

    def read(self) -> None:
        """Take in what it has said; never blocks."""
        while self.failure is None and is_readable(self._channel.fileno()):
            try:
                message = receive(self._channel)
            except ConnectionResetError:
                message = None
            if message is None:
                self.process.wait()
                self.failure = (
                    f"the preloading process ended with code {self.process.returncode}: {self._said()}"
                )
                return
            self._take(*message)

        if self.failure is None and not self.was_ready and time.monotonic() - self._began > IMPORT_SECONDS:
            self.process.kill()
            self.failure = f"the preloading process was not ready within {IMPORT_SECONDS:.0f} s"

    def ask(self, request: Request, control: int) -> str | None:
        """Queue a request; why it could not be."""
        if self.failure is not None:
            return self.failure
        try:
            send_request(self._channel, request, control)
        except OSError as error:
            self.read()  # it may have said why it went
            return self.failure or f"the preloading process was not reached: {error}"
        self.running.add(request.probe_id)
        return None

    def is_busy(self) -> bool:
        """Whether a probe of it runs."""
        return bool(self.running)

    def close(self) -> None:
        """End it; its supervisors then end their probes. Waits for itself only."""
        self._channel.close()
        with suppress(ProcessLookupError):
            self.process.terminate()
        self.process.wait()
        for _, pidfd in self.started.values():
            os.close(pidfd)
        self.started = {}
        self.failure = self.failure or "closed"
        self._log.close()

    def _take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        match message:
            case {"ready": seconds}:
                self.was_ready, self.import_seconds = True, seconds
            case {"started": probe_id, "pid": pid}:
                self.started[probe_id] = (pid, descriptors[0])
            case {"skipped": probe_id}:
                self.skipped.add(probe_id)
            case {"refused": probe_id, "why": text}:
                self.refused[probe_id] = text
            case {"error": text}:
                self.failure = text

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


class ForkedProbe:
    """An attempt that a zygote is to start, has started, or (where it cannot) torchrun has."""

    def __init__(
        self, zygote: Zygote, request: Request, directory: Path, cold: Callable[[], WardenProcess]
    ) -> None:
        self.probe_id = request.probe_id
        self.directory = directory
        self.pid: int | None = None
        """The supervisor's."""
        self._zygote, self._cold = zygote, cold
        self._pidfd: int | None = None
        self._fallback: WardenProcess | None = None
        self._asked = False
        self._ended = False
        reading, self._control = os.pipe()
        self._failure = zygote.ask(request, reading)
        os.close(reading)

    @property
    def launcher(self) -> str:
        """``preloaded``, or why torchrun started it."""
        if self._fallback is None:
            return "preloaded"
        return f"torchrun ({self._failure})"

    def ask_to_stop(self) -> None:
        """Begin the orderly end; returns at once."""
        if self._fallback is not None:
            self._fallback.ask_to_stop()
        if not self._asked:
            self._asked = True
            os.close(self._control)

    def has_ended(self) -> bool:
        """Whether every process is gone; starts the probe by torchrun where the zygote has failed."""
        if self._ended:
            return True
        self._advance()
        if self._fallback is not None:
            self._ended = self._fallback.has_ended()
        elif self._pidfd is None:
            self._ended = self._asked and self._never_began()
        elif is_readable(self._pidfd):
            self._conclude()
        return self._ended

    def wait(self) -> None:
        """Block until every process is gone."""
        while not self.has_ended():
            if self._fallback is not None:
                self._fallback.wait()
            else:
                if self._pidfd is None:
                    time.sleep(WAIT_SECONDS)
                else:
                    is_readable(self._pidfd, WAIT_SECONDS)

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor, for tests."""
        if self._pidfd is not None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def exit_record(self) -> dict[str, Any] | None:
        """What the supervisor wrote; ``None`` where it was killed or never began."""
        return processes.exit_record(self.directory)

    def _advance(self) -> None:
        """Learn what became of the request."""
        if self._pidfd is not None or self._fallback is not None:
            return
        self._zygote.read()
        if self.probe_id in self._zygote.started:
            self.pid, self._pidfd = self._zygote.started.pop(self.probe_id)
            return
        self._failure = self._failure or self._zygote.refused.pop(self.probe_id, None) or self._zygote.failure
        if self._failure is not None:
            if self._zygote.was_ready:  # it may have died between the fork and its answer
                processes.kill_marked(self.probe_id)
            self._zygote.running.discard(self.probe_id)
            if not self._asked:
                self._fallback = self._cold()

    def _never_began(self) -> bool:
        """Of a probe that was cancelled: a zygote looks for that before it forks, and says so."""
        never = (
            self._failure is not None or not self._zygote.was_ready or self.probe_id in self._zygote.skipped
        )
        if never:
            self._zygote.running.discard(self.probe_id)
        return never

    def _conclude(self) -> None:
        assert self._pidfd is not None
        os.close(self._pidfd)
        self.ask_to_stop()
        if self.exit_record() is None:
            processes.kill_marked(self.probe_id)
        self._zygote.running.discard(self.probe_id)
        self._ended = True
