"""``python -u -m titan_tune.probe.preload.zygote PARENT_PID SOCKET_FD``: imports once, then forks probes.

It answers ``ready`` or ``error`` on the socket, then each request with the pid and a pidfd of the probe's
supervisor, or with why there is none. It ends when the socket closes or its parent does; supervisors then end
their probes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Final

from titan_tune.probe.preload import imports, supervisor
from titan_tune.probe.preload.mark import Mark
from titan_tune.probe.preload.messages import Request, receive, send
from titan_tune.probe.preload.ranks import Rank

POLL_SECONDS: Final = 0.2


def main() -> None:
    """Serve until the search ends; in a rank, go on to be torchtitan."""
    parent, descriptor = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark = Mark.find()
    interpreter = dict(os.environ)
    with socket.socket(fileno=descriptor) as channel:
        try:
            seconds = imports.preload()
            check_fork()
        except Exception as error:
            traceback.print_exc()
            send(channel, {"error": f"{type(error).__name__}: {error}"})
            return
        send(channel, {"ready": seconds})
        rank = serve(channel, parent, mark, interpreter)
    if rank is not None:
        # here, not deeper: what it raises ends this process as it would end ``python -m``
        rank.run(imports.RUN_AS_MAIN)


def serve(
    channel: socket.socket, parent: int, mark: Mark | None, interpreter: Mapping[str, str]
) -> Rank | None:
    """Fork a supervisor for each request. Returns ``None`` at the end, and in each rank what it is to run."""
    while os.getppid() == parent:
        reap()
        if not select.select([channel], [], [], POLL_SECONDS)[0]:
            continue
        try:
            message = receive(channel)
        except ConnectionResetError:
            return None
        if message is None:
            return None
        request = Request(**message[0]["request"])
        (control,) = message[1]
        if select.select([control], [], [], 0)[0]:  # cancelled while this process imported
            os.close(control)
            send(channel, {"skipped": request.probe_id})
            continue
        rank = fork_supervisor(channel, request, control, mark, interpreter)
        if rank is not None:
            return rank
    return None


def fork_supervisor(
    channel: socket.socket, request: Request, control: int, mark: Mark | None, interpreter: Mapping[str, str]
) -> Rank | None:
    """Fork, and answer the search; what each rank is to run in the ranks, which the supervisor forks."""
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # the other probes of this process go on
        os.close(control)
        send(channel, {"refused": request.probe_id, "why": f"fork failed: {error}"})
        return None
    if pid == 0:
        try:
            channel.close()
            if mark is not None:
                mark.write(request.probe_id)
            result = supervisor.run(request, control, zygote, interpreter)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        if isinstance(result, Rank):
            return result
        sys.stdout.flush()
        os._exit(result)
    os.close(control)
    pidfd = os.pidfd_open(pid)
    send(channel, {"started": request.probe_id, "pid": pid}, (pidfd,))
    os.close(pidfd)
    return None


def check_fork() -> None:
    """Raise OSError where this process cannot fork, or cannot hand out what it forked."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.close(os.pidfd_open(pid))
    finally:
        os.waitpid(pid, 0)


def reap() -> None:
    """Collect the supervisors that ended."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
