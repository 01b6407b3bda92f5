"""What collectives leave in their outputs when one rank runs without its peers.

torch's fake process group gathers copies of what the rank itself gives and leaves every other output as it
was: memory that nobody wrote. Which values come in hardly matters to a dry run, but NaNs, zeros and denormals
do: they change the speed of kernels, float8 scales and the routing of tokens. So kernels of the ``c10d``
operators, which eager, functional and compiled collectives and DDP's reducer all end in, write what peers in
the same state would have sent. They write in place, without allocating: memory stays that of a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch._C._distributed_c10d import FakeWork, ProcessGroup

ACTIVATION_STD: Final = 1.0
"""Of received hidden states: what the normalised embeddings of a new model have."""
GRADIENT_STD: Final = 1e-3
"""Of received gradients: far from the smallest normal number of bf16 (1e-38) and of fp16 (6e-5)."""
SEED: Final = 0


class Answers:
    """The kernels, for as long as this object lives. ``device_type`` is ``cuda`` or ``cpu``."""

    def __init__(self, device_type: str, *, partial_sums: Collection[str], futures: bool) -> None:
        """``partial_sums``: names of groups whose reduce-scatters add activations up (tensor parallelism).
        ``futures``: all-reduces return their tensors in a future, as DDP's reducer needs them."""
        reducing, messages = _ReduceScatter(frozenset(partial_sums)), _Messages(_message_stream(device_type))
        kernels: dict[str, Callable[..., Any]] = {
            "_reduce_scatter_base_": reducing.base,
            "reduce_scatter_": reducing.lists,
            "reduce_scatter_tensor_coalesced_": reducing.coalesced,
            "alltoall_base_": _all_to_all_base,
            "alltoall_": _all_to_all,
            "send": messages.send,
            "recv_": messages.receive,
        }
        if futures:
            kernels["allreduce_"] = _all_reduce_with_future
        self._library = torch.library.Library("c10d", "IMPL")
        for name, kernel in kernels.items():
            self._library.impl(name, torch.no_grad()(kernel), device_type.upper(), allow_override=True)


def _done() -> Any:
    return FakeWork().boxed()


class _ReduceScatter:
    """Gradients come out as if the peers had none. Activations must not: a token whose embedding is another
    rank's would stay zero, norms would blow its gradient up, and deep models end in NaNs. Their peers' shares of
    this rank's part are taken to be this rank's own shares of the peers' parts, which are distributed alike."""

    def __init__(self, partial_sums: frozenset[str]) -> None:
        self._partial_sums = partial_sums

    def base(self, output: torch.Tensor, given: torch.Tensor, group: Any, *_: Any) -> tuple[Any, Any]:
        self._reduce(output, given, ProcessGroup.unbox(group))
        return output, _done()

    def coalesced(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], group: Any, *_: Any
    ) -> Any:
        for output, tensor in zip(outputs, given, strict=True):
            self._reduce(output, tensor, ProcessGroup.unbox(group))
        return _done()

    def lists(
        self, outputs: Sequence[torch.Tensor], given: Sequence[Sequence[torch.Tensor]], group: Any, *_: Any
    ) -> tuple[Any, Any]:
        rank = ProcessGroup.unbox(group).rank()
        for output, parts in zip(outputs, given, strict=True):
            output.copy_(parts[rank])
        return outputs, _done()

    def _reduce(self, output: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        parts, flat = given.view(group.size(), -1), output.view(-1)
        if group.group_name in self._partial_sums:
            torch.sum(parts, dim=0, out=flat)
        else:
            flat.copy_(parts[group.rank()])


def _all_to_all_base(
    output: torch.Tensor,
    given: torch.Tensor,
    group: Any,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    *_: Any,
) -> Any:
    """Every peer sends this rank what it would send itself: counts of tokens and tokens then agree."""
    peers = ProcessGroup.unbox(group)
    if not output_splits and not input_splits and not given.is_floating_point():
        parts = given.view(peers.size(), -1)
        output.view(peers.size(), -1).copy_(parts[peers.rank()].expand_as(parts))
    else:
        _repeat_into(output, given)
    return _done()


def _repeat_into(output: torch.Tensor, given: torch.Tensor) -> None:
    """``given``'s rows, again and again until ``output`` is full."""
    if given.shape[0] == 0:
        output.zero_()
        return
    for start in range(0, output.shape[0], given.shape[0]):
        rows = output[start : start + given.shape[0]]
        rows.copy_(given[: rows.shape[0]])


def _all_to_all(
    outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], group: Any, *_: Any
) -> tuple[Any, Any]:
    own = given[ProcessGroup.unbox(group).rank()]
    for output in outputs:
        _repeat_into(output.view(-1), own.reshape(-1))
    return outputs, _done()


def _all_reduce_with_future(tensors: Sequence[torch.Tensor], *_: Any) -> tuple[Any, Any]:
    """The fake group's future holds nothing, and DDP's reducer asserts a tensor."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    work: Any = getattr(torch._C._distributed_c10d, "_create_work_from_future")(future)  # noqa: B009 - not in the stubs
    return tensors, work.boxed()


def _message_stream(device_type: str) -> Any:
    return torch.cuda.Stream() if device_type == "cuda" else None


class _Messages:
    """Sends go nowhere; receive buffers are filled with small random numbers, each once: stages keep theirs.

    NCCL marks the memory of both as used by a stream of its own, which waits for the one that computes
    (``ProcessGroupNCCL::pointToPoint``). What is freed meanwhile is given out again only when the device has
    got that far, and the host is ahead of it: a pipeline holds more hidden states than its schedule says.
    """

    def __init__(self, stream: Any) -> None:
        """``stream``: where messages would travel; ``None`` on a processor."""
        self._stream = stream
        self._generators: dict[torch.device, torch.Generator] = {}

    def send(self, tensors: Sequence[torch.Tensor], *_: Any) -> Any:
        self._in_flight(tensors)
        return _done()

    def receive(self, tensors: Sequence[torch.Tensor], *_: Any) -> Any:
        for tensor in tensors:
            # integers are messages of the pipeline's own, and 0 is an answer
            if tensor.is_floating_point() and not getattr(tensor, "_titan_tune_filled", False):
                std = ACTIVATION_STD if tensor.requires_grad else GRADIENT_STD
                # .data: a message that comes in does not count as a change of the tensor either
                tensor.data.normal_(0.0, std, generator=self._generator(tensor.device))
                tensor._titan_tune_filled = True
        self._in_flight(tensors)
        return _done()

    def _in_flight(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def _generator(self, device: torch.device) -> torch.Generator:
        """One per device, away from the random numbers of the job."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)
        return self._generators[device]
