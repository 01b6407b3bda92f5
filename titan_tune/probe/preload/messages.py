"""What search and zygote say to each other: JSON messages with file descriptors, on a Unix socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

MAX_BYTES: Final = 1 << 17
"""Of one message: most of it is the environment. Less than a Unix socket's default buffer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt of a probe. The control pipe's reading end comes with it."""

    probe_id: str
    """32 hexadecimal digits."""
    num_ranks: int
    environment: dict[str, str]
    """What torchrun would get."""
    arguments: tuple[str, ...]
    """Of ``torchtitan.train``."""
    log: str
    """File that all output is appended to."""
    exit_file: str
    rank_directory: str
    """Folder for each rank's own files."""
    grace_seconds: float


def send_request(channel: socket.socket, request: Request, control: int) -> None:
    """Ask for a probe. Raises OSError where the zygote has gone or the message is too long."""
    send(channel, {"request": asdict(request)}, (control,))


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """One message. Raises OSError where nobody reads or it is too long."""
    text = json.dumps(message).encode()
    if len(text) > MAX_BYTES:
        raise OSError(f"a message of {len(text)} bytes is too long")
    socket.send_fds(channel, [text], list(descriptors))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors; ``None`` at the end."""
    text, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, 4)
    return (json.loads(text), descriptors) if text else None
