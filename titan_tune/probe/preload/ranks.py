"""The processes of one probe: forked, given the environment torchrun would give, and watched as it would."""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from titan_tune.probe import warden

NAME: Final = "torchtitan.train"
PUMP_SECONDS: Final = 10.0
"""How long to wait for the last output of processes that have ended."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a forked process is to run."""

    arguments: tuple[str, ...]

    def run(self, module: str) -> None:
        """As ``python -m module ARGUMENTS`` would."""
        from torchtitan.config import ConfigManager

        sys.argv = [module, *self.arguments]
        # the one import-time reader of sys.argv: a default of parse_args(args=sys.argv[1:])
        ConfigManager.parse_args.__defaults__ = (list(self.arguments),)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def rank_environment(
    environment: Mapping[str, str], *, rank: int, num_ranks: int, port: int, run_id: str, error_file: Path
) -> dict[str, str]:
    """``environment`` and what ``torchrun --standalone`` adds to it for a worker."""
    added = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "rank",
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    return {**environment, **added}


def become_rank(environment: Mapping[str, str], output: int, supervisor: int) -> None:
    """Make this fork what a worker of torchrun is when its interpreter starts."""
    warden.prctl(warden.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    _seed_afresh()


def _seed_afresh() -> None:
    """Python, NumPy and torch's CPU generator begin with chance in a fresh process, and so differ between ranks."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()


class RankGroup:
    """The ranks as one command of the warden: when one fails the others are ended, as torchrun does it."""

    def __init__(self, pids: Sequence[int], error_files: Sequence[Path], grace_seconds: float) -> None:
        self.pids = tuple(pids)
        self.codes: dict[int, int] = {}
        self._error_files = tuple(error_files)
        self._grace_seconds = grace_seconds
        self._kill_at: float | None = None
        self._failures: dict[int, Any] = {}

    def poll(self) -> int | None:
        """0 where all ranks ended well, 1 where one failed, ``None`` while any runs."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._take(rank, os.waitstatus_to_exitcode(status))
        if len(self.codes) == len(self.pids):
            return int(any(self.codes.values()))
        if any(self.codes.values()):
            self._end_the_others()
        return None

    def terminate(self) -> None:
        """SIGTERM to every rank that runs."""
        self._signal(signal.SIGTERM)

    def summary(self) -> str:
        """torchrun's own report of the ranks that failed, the first one as root cause; empty for none."""
        if not self._failures:
            return ""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        return f"{ChildFailedError.__module__}.ChildFailedError: {ChildFailedError(NAME, self._failures)}"

    def _take(self, rank: int, code: int) -> None:
        self.codes[rank] = code
        if code != 0:
            from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

            self._failures[rank] = ProcessFailure(
                local_rank=rank, pid=self.pids[rank], exitcode=code, error_file=str(self._error_files[rank])
            )

    def _end_the_others(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace_seconds
            self.terminate()
        elif time.monotonic() > self._kill_at:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:  # not reaped, so the pid is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


class Output:
    """Copies each rank's output to the log, line by line, with torchrun's prefix."""

    def __init__(self, pipes: Sequence[int], log: Path) -> None:
        self._log = log.open("ab", buffering=0)
        self._threads = [
            threading.Thread(target=self._copy, args=(os.fdopen(pipe, "rb"), f"[rank{rank}]:"), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, pipe: BinaryIO, prefix: str) -> None:
        with pipe:
            for line in pipe:
                self._log.write(prefix.encode() + line.removesuffix(b"\n") + b"\n")

    def finish(self) -> None:
        """Wait for what has been written by processes that have ended."""
        deadline = time.monotonic() + PUMP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
