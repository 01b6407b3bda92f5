"""Records what a fake-tensor run allocates: every storage's birth and death, by stream.

Runs in the child process only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._guards import active_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titan_tune.trace.events import Allocate, Event, Free, Mark
from titan_tune.trace.streams import current_stream


class Origin(NamedTuple):
    """Where a storage was born: the phase, the operator and the shape of its tensor."""

    phase: str
    operator: str
    shape: tuple[int, ...]
    stream: int


class _Birth(NamedTuple):
    block: int
    num_bytes: int
    origin: Origin


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages below a tensor, through DTensor, async collectives and tensor subclasses."""
    if isinstance(tensor, DTensor):
        return storages(tensor._local_tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        return storages(tensor.elem)
    if hasattr(tensor, "__tensor_flatten__"):
        # not through that method: torchao's looks at the value of a scale
        inner = [value for value in vars(tensor).values() if isinstance(value, torch.Tensor)]
        return [storage for each in inner for storage in storages(each)]
    return [tensor.untyped_storage()]


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode below everything else; ``log`` grows while it is entered and not paused."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[_Birth | Free | Mark] = []
        self.phase = "init"
        self.on_operator: Callable[[Any, tuple[Any, ...]], None] | None = None
        """Called after every counted operator: allocations that kernels make inside themselves."""
        self._paused = 0
        self._count = 0
        self._live: dict[int, tuple[int, int, Any]] = {}
        """Storage address → block, bytes and a weak reference to the storage."""
        self._resize = torch.UntypedStorage.resize_
        self._fake_mode: Any = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo refuses to compile under modes that are not."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Operators that the compiler traces are no allocations."""
        return True

    def reset(self) -> None:
        """Forget everything; storages that still live are not counted again unless used again."""
        self.log = []
        self.phase = "init"
        self._live.clear()

    def mark(self, phase: str) -> None:
        """A phase begins."""
        if phase != self.phase:
            self.phase = phase
            self.log.append(Mark(phase))

    @contextmanager
    def paused(self) -> Any:
        """Operators inside do not allocate on the device."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def track(self, tensor: torch.Tensor, operator: str) -> None:
        """Count the storages of a tensor that were not seen before, or whose size changed."""
        for storage in storages(tensor):
            known = self._live.get(storage._cdata)
            if known is not None and known[2]() is storage:
                if known[1] != storage.nbytes():
                    self._resized(storage)
            else:
                self._born(storage, self._origin(operator, tensor.shape))

    def block(self, num_bytes: int, operator: str) -> int:
        """A block that no tensor holds; lives until :meth:`release`."""
        self._count += 1
        self.log.append(_Birth(self._count, num_bytes, self._origin(operator, ())))
        return self._count

    def release(self, block: int) -> None:
        """Free what :meth:`block` made."""
        self.log.append(Free(block))

    def blocks_of(self, tensors: Iterable[torch.Tensor | None]) -> set[int]:
        """Numbers of the live storages of tensors."""
        found = set()
        for tensor in tensors:
            for storage in [] if tensor is None else storages(tensor):
                if storage._cdata in self._live:
                    found.add(self._live[storage._cdata][0])
        return found

    def events(self, component: Callable[[int, Origin], str]) -> list[Event]:
        """The log with every birth given its component."""
        return [
            Allocate(e.block, e.num_bytes, e.origin.stream, component(e.block, e.origin))
            if isinstance(e, _Birth)
            else e
            for e in self.log
        ]

    def _origin(self, operator: str, shape: Collection[int]) -> Origin:
        return Origin(self.phase, operator, tuple(shape), current_stream().number)

    def _born(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        key = storage._cdata
        self._count += 1
        block, size = self._count, storage.nbytes()
        self._live[key] = (block, size, weakref.ref(storage, partial(self._died, key, block)))
        if size > 0:
            self.log.append(_Birth(block, size, origin))

    def _died(self, key: int, block: int, reference: Any) -> None:
        known = self._live.get(key)
        if known is not None and known[0] == block:
            del self._live[key]
            if known[1] > 0:
                self.log.append(Free(block))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is None or known[1] == storage.nbytes():
            return
        if known[1] > 0:
            self.log.append(Free(known[0]))
        self._born(storage, self._origin("resize_", ()))

    def __enter__(self) -> Recorder:
        self._fake_mode = active_fake_mode()
        original, recorder = self._resize, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            recorder._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(t is DTensor or t is AsyncCollectiveTensor for t in types):
            return NotImplemented
        is_wait = func is torch.ops._c10d_functional.wait_tensor.default
        result = args[0] if is_wait else func(*args, **(kwargs or {}))
        if self._paused or active_fake_mode() is not self._fake_mode:
            return result
        name = None
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                name = name or str(func)
                self.track(tensor, name)
        if self.on_operator is not None:
            self.on_operator(func, args)
        return result
