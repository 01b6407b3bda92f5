"""A probe's warden and torchrun's agent in one process, forked by the zygote.

It hosts the store of the ranks' rendezvous, like torchrun's agent, on a port that it holds from the start:
no other process can take it in between.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_tune.probe import warden
from titan_tune.probe.preload.messages import Request
from titan_tune.probe.preload.ranks import Output, Rank, RankGroup, become_rank, rank_environment


def run(request: Request, control: int, zygote: int, interpreter: Mapping[str, str]) -> Rank | int:
    """Start and watch the ranks; the exit code of this process, or in a rank what it is to run.

    ``control`` is the order to stop once it can be read; ``interpreter`` is the zygote's first environment.
    """
    must_stop = warden.take_office(zygote)
    _redirect_output(Path(request.log))
    os.environ.clear()
    os.environ.update(_as_the_interpreter_has_it(request.environment, interpreter))
    environment = {**os.environ}
    supervisor, listener = os.getpid(), _listener()
    pids: list[int] = []
    pipes: list[int] = []
    error_files: list[Path] = []
    for rank in range(request.num_ranks):
        error_file = Path(request.rank_directory) / str(rank) / "error.json"
        error_file.parent.mkdir(parents=True, exist_ok=True)
        of_rank = rank_environment(
            environment,
            rank=rank,
            num_ranks=request.num_ranks,
            port=listener.getsockname()[1],
            run_id=request.probe_id,
            error_file=error_file,
        )
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (control, listener.detach(), reading, *pipes):
                os.close(descriptor)
            become_rank(of_rank, writing, supervisor)
            return Rank(tuple(request.arguments))
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
        error_files.append(error_file)
    # threads only from here on: forks come first
    output = Output(pipes, Path(request.log))
    group = RankGroup(pids, error_files, request.grace_seconds)
    store = _store(listener)

    def report() -> None:
        output.finish()
        if summary := group.summary():
            print(summary, file=sys.stderr, flush=True)

    code = warden.supervise(
        group,
        must_stop,
        control=control,
        grace=request.grace_seconds,
        exit_file=Path(request.exit_file),
        when_ended=report,
    )
    del store
    return code


def _as_the_interpreter_has_it(
    environment: Mapping[str, str], interpreter: Mapping[str, str]
) -> dict[str, str]:
    """``environment`` as a Python that starts in it sees it: it may coerce the locale."""
    coerced = {
        name: interpreter[name] for name in ("LC_CTYPE",) if name in interpreter and name not in environment
    }
    return {**coerced, **environment}


def _redirect_output(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _listener() -> socket.socket:
    """A port on all addresses, as torch's own store would take one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _store(listener: socket.socket) -> Any:
    """The store that the ranks connect to, on ``listener``."""
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore(
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
