"""Streams that only carry a number: ``torch.cpu`` has none, and FSDP allocates on its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Event:
    """``torch.cuda.Event``'s methods; everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> Event:
        """Nothing to record."""
        return self

    def wait(self, *args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


class Stream:
    """``torch.cuda.Stream``'s methods, and a number: the allocator has one pool for each."""

    _made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = Stream._made
        Stream._made += 1

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True


_stack = [Stream()]


def current_stream(device: Any = None) -> Stream:
    """The innermost stream; number 0 is the default stream."""
    return _stack[-1]


@contextmanager
def stream(new: Stream | None) -> Iterator[None]:
    """Make a stream current."""
    if new is None:
        yield
        return
    _stack.append(new)
    try:
        yield
    finally:
        _stack.pop()
