"""How long parts of a step take on the device, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

_NOTHING: Final = nullcontext()


class Timer:
    """Marks on the current stream around pieces of work, read when the device is idle."""

    def __init__(self, device_type: str) -> None:
        self.active = False
        self._cuda = device_type == "cuda"
        self._marks: list[tuple[Any, Any, Any]] = []

    def time(self, what: Any) -> AbstractContextManager[None]:
        """Around one piece of work; nothing unless ``active``."""
        return self._timed(what) if self.active else _NOTHING

    @contextmanager
    def _timed(self, what: Any) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((what, start, self._mark()))

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[tuple[Any, float]]:
        """(what, seconds) of all pieces, in the order in which they ended; the device has to be idle."""
        if self._cuda:
            return [(what, start.elapsed_time(end) / 1000) for what, start, end in self._marks]
        return [(what, end - start) for what, start, end in self._marks]
