"""``collectives.rank*.json``: every collective that one rank issues in one optimizer step.

Counted where all of them pass, at the ``c10d`` operators, in one step only: the other steps run as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from titan_tune.titan.plugin.dry_run_stages import IS_ACTIVATION
from titan_tune.titan.plugin.dry_run_timer import Timer

OPTIMIZER: Final = "optimizer"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"

_GRADIENT_MESHES: Final = ("fsdp", "efsdp", "dp_replicate")


class Call(NamedTuple):
    """What two collectives have in common that are counted as one."""

    op: str
    bytes: int
    """The whole tensor: what an all-gather puts out, a reduce-scatter or all-to-all takes in."""
    group: str
    phase: str
    side_stream: bool
    """Issued from another stream than the one that computes."""


class _Operator(NamedTuple):
    op: str
    size: Callable[..., int]
    group: int
    """Position of the process group in the arguments."""


def _nbytes(value: Any) -> int:
    """Of a tensor or of all tensors in nested lists."""
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


_OPERATORS: Final[Mapping[str, _Operator]] = {
    "allreduce_": _Operator("all_reduce", lambda tensors, *_: _nbytes(tensors), 1),
    "allreduce_coalesced_": _Operator("all_reduce", lambda tensors, *_: _nbytes(tensors), 1),
    "broadcast_": _Operator("broadcast", lambda tensors, *_: _nbytes(tensors), 1),
    "allgather_": _Operator("all_gather", lambda outputs, *_: _nbytes(outputs), 2),
    "_allgather_base_": _Operator("all_gather", lambda output, *_: _nbytes(output), 2),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", lambda outputs, *_: _nbytes(outputs), 2),
    "reduce_scatter_": _Operator("reduce_scatter", lambda _, given, *__: _nbytes(given), 2),
    "_reduce_scatter_base_": _Operator("reduce_scatter", lambda _, given, *__: _nbytes(given), 2),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", lambda _, given, *__: _nbytes(given), 2),
    "alltoall_": _Operator("all_to_all", lambda _, given, *__: _nbytes(given), 2),
    "alltoall_base_": _Operator("all_to_all", lambda _, given, *__: _nbytes(given), 2),
    "send": _Operator("send", lambda tensors, *_: _nbytes(tensors), 1),
    "recv_": _Operator("recv", lambda tensors, *_: _nbytes(tensors), 1),
}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communicator."""

    ranks: tuple[int, ...]
    mesh_dims: tuple[str, ...]
    """torchtitan's names of the mesh dimensions that have these ranks: one group may serve several."""

    @property
    def stride(self) -> int:
        """Distance of its first two ranks."""
        return self.ranks[1] - self.ranks[0]


class CollectiveCounter:
    """Counts between ``start`` and ``stop``."""

    def __init__(self, device_type: str) -> None:
        self.calls: Counter[Call] = Counter()
        self.in_model = False
        """Whether forwards and backwards are running; else it is the optimizer's phase."""
        self._timer = Timer(device_type)
        self._key = device_type.upper()
        self._library: Any = None
        self._compute_stream: Any = None

    def start(self) -> None:
        """Put a counting kernel before each operator's own."""
        self._compute_stream = torch.cuda.current_stream() if self._key == "CUDA" else None
        self._timer.active = True
        self._library = torch.library.Library("c10d", "IMPL")
        for name, operator in _OPERATORS.items():
            kernel = torch.library.get_kernel(f"c10d::{name}", self._key)
            counting = self._counting(operator, kernel)
            self._library.impl(name, counting, self._key, with_keyset=True, allow_override=True)

    def stop(self) -> None:
        """The operators are as they were."""
        self._timer.active = False
        self._library._destroy()
        self._library = None

    def _counting(self, operator: _Operator, kernel: Any) -> Callable[..., Any]:
        def count(keyset: Any, *args: Any) -> Any:
            group = ProcessGroup.unbox(args[operator.group])
            compute = self._compute_stream
            side = compute is not None and torch.cuda.current_stream() != compute
            if group.size() > 1:
                phase = self._phase(operator.op, args[0])
                self.calls[Call(operator.op, operator.size(*args), group.group_name, phase, side)] += 1
            with nullcontext() if side else self._timer.time(operator.op):
                return kernel.call_boxed(keyset, *args)

        return count

    def _phase(self, op: str, first: Any) -> str:
        if not self.in_model:
            return OPTIMIZER
        if torch._C._current_graph_task_id() != -1:
            return BACKWARD
        if op in ("send", "recv"):
            # between stages, outside of autograd: received activations want gradients, gradients do not
            return FORWARD if first[0].requires_grad or hasattr(first[0], IS_ACTIVATION) else BACKWARD
        return FORWARD

    def answer_seconds(self) -> float:
        """What stood for the collectives on the stream that computes: no part of the rank's own work."""
        return math.fsum(seconds for _, seconds in self._timer.seconds())

    def records(self, groups: Mapping[str, Group]) -> list[dict[str, Any]]:
        """Plain data, the largest in all first."""
        rows = [_record(call, count, groups[call.group]) for call, count in self.calls.items()]
        return sorted(rows, key=lambda row: -row["count"] * row["bytes"])


def _record(call: Call, count: int, group: Group) -> dict[str, Any]:
    phase, mesh_dim = call.phase, mesh_dim_of(call, group.mesh_dims)
    if phase == FORWARD and call.op == "reduce_scatter" and mesh_dim in _GRADIENT_MESHES:
        phase = BACKWARD  # a pipeline reduces its gradients when the last microbatch has been through
    return {
        "op": call.op,
        "count": count,
        "bytes": call.bytes,
        "group_size": len(group.ranks),
        "stride": group.stride,
        "first_rank": group.ranks[0],
        "mesh_dim": mesh_dim,
        "phase": phase,
        "side_stream": call.side_stream,
    }


def mesh_dim_of(call: Call, mesh_dims: tuple[str, ...]) -> str | None:
    """The mesh dimension that a collective serves; ``None`` for groups of no mesh.

    With one data-parallel shard, ``cp`` and ``fsdp`` are one group: FSDP has streams of its own, context
    parallelism waits on the stream that computes.
    """
    preferred = _PREFERRED.get(call.op, _PREFERRED_OTHERWISE)
    if call.op in ("all_gather", "reduce_scatter") and "cp" in mesh_dims and not call.side_stream:
        preferred = ("tp", "etp", "cp") if torch.cuda.is_available() else preferred
    return next((name for name in (*preferred, *mesh_dims) if name in mesh_dims), None)


_PREFERRED: Final[Mapping[str, tuple[str, ...]]] = {
    "all_to_all": ("ep", "cp"),
    "send": ("pp",),
    "recv": ("pp",),
}
_PREFERRED_OTHERWISE: Final = ("tp", "etp", "fsdp", "efsdp", "dp_replicate", "cp")


def process_groups(meshes: Mapping[str, Any]) -> dict[str, Group]:
    """Every group of more than one rank by its name; ``meshes`` are torchtitan's one-dimensional ones."""
    dims: dict[str, list[str]] = {}
    for name, mesh in meshes.items():
        dims.setdefault(mesh.get_group().group_name, []).append(name)
    world = dist.distributed_c10d._world
    return {
        name: Group(tuple(sorted(world.pg_group_ranks[group])), tuple(dims.get(name, ())))
        for group, name in world.pg_names.items()
        if len(world.pg_group_ranks[group]) > 1
    }


def chunk_records(chunks: Iterable[tuple[tuple[int, str], float]]) -> list[dict[str, Any]]:
    """Seconds of each (stage, kind) of pipeline work: ``{"stage", "kind", "count", "seconds"}``."""
    times: dict[tuple[int, str], list[float]] = {}
    for (stage, kind), seconds in chunks:
        times.setdefault((stage, kind), []).append(seconds)
    return [
        {"stage": stage, "kind": kind, "count": len(values), "seconds": sum(values)}
        for (stage, kind), values in sorted(times.items())
    ]
