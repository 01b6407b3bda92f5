"""Time of collectives on an interconnect, and how much of it compute does not hide.

A collective is latency steps plus bytes over the slowest link of its ring (nccl-tests' bus bandwidth:
``(N-1)/N`` of the tensor for an all-gather, reduce-scatter or all-to-all, twice that for an all-reduce).
A group that spans nodes enters each node once, over the adapters of its members there, as NCCL's rings
do. What is hidden follows torchtitan 0.2.2: FSDP prefetches gathers and scatters behind compute, DDP and
HSDP reduce behind backward, tensor, context and expert parallelism wait for their collectives. Async TP
changes nothing there: 0.2.2 leaves the TP group without symmetric memory, and a two-GPU H200 run is as
fast with it as without.

Records come from a dry run, which counts what one rank issues, or from the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from titan_tune.domain.settings import ParallelDims


class Op(StrEnum):
    """What a collective does; names as in ``torch.distributed``."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"

    @property
    def is_p2p(self) -> bool:
        """Whether it has one sender and one receiver."""
        return self is Op.SEND or self is Op.RECV


class Cause(StrEnum):
    """The parallelism that a collective serves."""

    FSDP = "fsdp"
    HSDP = "hsdp"
    DDP = "ddp"
    TP = "tp"
    CP = "cp"
    PP = "pp"
    EP = "ep"
    OTHER = "other"
    """Loss, gradient norm and the like: a few bytes each."""


NCCL_LAUNCH_SECONDS: Final = 10e-6
"""Of one collective, whatever it moves: base latency of LL128 rings in NCCL's tuning.cc."""
OVERLAPPED: Final = frozenset({Cause.FSDP, Cause.HSDP, Cause.DDP})
"""They run beside compute on streams of their own."""


@dataclass(slots=True, unsafe_hash=True)
class CollectiveRecord:
    """Equal collectives of one rank in one optimizer step. Not frozen, only because the formula makes several a
    candidate and a frozen one takes six times as long to make."""

    op: Op
    count: int
    bytes: float
    """Of one call, the whole tensor: what an all-gather puts out, a reduce-scatter or all-to-all takes in, an
    all-reduce or broadcast works on, a send or receive carries."""
    group_size: int
    stride: int = 1
    """Distance of neighbours in the group, in ranks."""
    first_rank: int = 0
    phase: str = ""
    """forward, backward or optimizer."""
    cause: Cause = Cause.OTHER


class Rate(NamedTuple):
    """Latency and slope of one operation on one kind of link."""

    gb_per_s: float
    """Bus bandwidth of large messages, GB/s a rank and direction."""
    latency_seconds: float
    """Of one step from a rank to its neighbour."""


@dataclass(frozen=True, slots=True)
class Link:
    """What one rank sends over, to ranks of its node or of others."""

    rate: Rate
    by_op: Mapping[Op, Rate] = field(default_factory=lambda: MappingProxyType({}))
    """Measured operations; the others have ``rate``."""
    source: str = ""

    def of(self, op: Op) -> Rate:
        """The rate of an operation; a receive is the other end of a send."""
        return self.by_op.get(Op.SEND if op is Op.RECV else op, self.rate) if self.by_op else self.rate


class Pace(NamedTuple):
    """How long one operation takes on one group, whatever it moves."""

    seconds: float
    """Of an empty collective."""
    bytes_per_second: float
    """Of what each rank sends (:func:`bus_bytes`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Interconnect:
    """Links of a cluster of equal nodes. Compared by identity: what is computed from one is kept for it."""

    name: str
    gpus_per_node: int
    intra: Link
    inter: Link
    """Of one rank's share of the node's adapters."""
    launch_seconds: float = NCCL_LAUNCH_SECONDS


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """Seconds of an optimizer step by cause."""

    busy: Mapping[Cause, float]
    """How long the collectives take on their own."""
    exposed: Mapping[Cause, float]
    """What they add to the step."""

    @property
    def busy_seconds(self) -> float:
        """All causes."""
        return sum(self.busy.values())

    @property
    def exposed_seconds(self) -> float:
        """All causes."""
        return sum(self.exposed.values())


NO_COMMUNICATION: Final = CommunicationTime(MappingProxyType({}), MappingProxyType({}))


class Exposure(NamedTuple):
    """Seconds added to a step per second of communication alone, by how torchtitan schedules it.

    Fitted with the step-time constants on two-GPU H200 runs (benchmarks/step_time_accuracy.py): overlap hides
    bytes, but NCCL's kernels slow the compute beside them, and the two about cancel. Rates are the catalogue's.
    """

    overlapped: float = 1.00
    """FSDP, HSDP, DDP."""
    waited_for: float = 1.0
    """CP, PP, EP and the rest: nothing is hidden."""
    tensor_parallel: float = 1.51
    """TP waits too, each time for the slower rank, and its messages are small."""


EXPOSURE = Exposure()


def group_nodes(group_size: int, stride: int, first_rank: int, gpus_per_node: int) -> tuple[int, int]:
    """(nodes that a group touches, its members in the fullest of them)."""
    if stride >= gpus_per_node:
        return group_size, 1
    last = first_rank + stride * (group_size - 1)
    nodes = last // gpus_per_node - first_rank // gpus_per_node + 1
    return nodes, min(group_size, -(-gpus_per_node // stride)) if nodes > 1 else group_size


_WHOLE: Final = (Op.SEND, Op.RECV, Op.BROADCAST)
"""Go once over each link."""


def bus_bytes(op: Op, num_bytes: float, group_size: int) -> float:
    """What each rank of a ring sends of a tensor of ``num_bytes`` (see :class:`CollectiveRecord`)."""
    if op in _WHOLE:
        return num_bytes
    return num_bytes * (group_size - 1) / group_size * (2 if op is Op.ALL_REDUCE else 1)


def ring_steps(op: Op, group_size: int) -> int:
    """Times that something goes from a rank to its neighbour, one after the other."""
    if op.is_p2p:
        return 1
    return (group_size - 1) * (2 if op is Op.ALL_REDUCE else 1)


def collective_seconds(
    op: Op,
    num_bytes: float,
    group_size: int,
    interconnect: Interconnect,
    *,
    stride: int = 1,
    first_rank: int = 0,
) -> float:
    """Seconds of one collective with nothing beside it; ``num_bytes`` as in :class:`CollectiveRecord`."""
    if group_size < 2:
        return 0.0
    pace = _pace(interconnect, op, group_size, stride, first_rank)
    return pace.seconds + bus_bytes(op, num_bytes, group_size) / pace.bytes_per_second


@lru_cache(maxsize=4096)
def _pace(interconnect: Interconnect, op: Op, group_size: int, stride: int, first_rank: int) -> Pace:
    nodes, members = group_nodes(group_size, stride, first_rank, interconnect.gpus_per_node)
    intra, launch = interconnect.intra.of(op), interconnect.launch_seconds
    if nodes == 1:
        return Pace(launch + ring_steps(op, group_size) * intra.latency_seconds, intra.gb_per_s * 1e9)
    inter = interconnect.inter.of(op)
    if op.is_p2p:  # neighbours of the group; the pair that crosses nodes sets the pace
        return Pace(launch + inter.latency_seconds, inter.gb_per_s * 1e9)
    rounds = 2 if op is Op.ALL_REDUCE else 1
    steps = rounds * ((group_size - nodes) * intra.latency_seconds + (nodes - 1) * inter.latency_seconds)
    rate = min(intra.gb_per_s, members * inter.gb_per_s)
    if op is Op.ALL_TO_ALL:  # every rank to every rank at once: the two kinds of link work side by side
        slower = max((members - 1) / intra.gb_per_s, (group_size - members) / inter.gb_per_s)
        rate = (group_size - 1) / slower
    return Pace(launch + steps, rate * 1e9)


def record_seconds(record: CollectiveRecord, interconnect: Interconnect) -> float:
    """Seconds of all calls of a record, one after the other."""
    op, size = record.op, record.group_size
    if size < 2:
        return 0.0
    pace = _pace(interconnect, op, size, record.stride, record.first_rank)
    return record.count * (pace.seconds + bus_bytes(op, record.bytes, size) / pace.bytes_per_second)


def busy_seconds(records: Iterable[CollectiveRecord], interconnect: Interconnect) -> dict[Cause, float]:
    """How long the collectives of one optimizer step take on their own, by cause."""
    busy: dict[Cause, float] = {}
    sends: dict[Cause, float] = {}
    for record in records:
        # links are full duplex: a rank's sends go beside its receives
        kind = sends if record.op is Op.SEND else busy
        kind[record.cause] = kind.get(record.cause, 0.0) + record_seconds(record, interconnect)
    for cause, seconds in sends.items():
        busy[cause] = max(busy.get(cause, 0.0), seconds)
    return busy


def exposed_seconds(
    records: Sequence[CollectiveRecord],
    interconnect: Interconnect,
    compute_seconds: float,
    exposure: Exposure = EXPOSURE,
) -> CommunicationTime:
    """What the collectives of one optimizer step add to ``compute_seconds`` of compute, by cause."""
    if not records:
        return NO_COMMUNICATION
    busy = busy_seconds(records, interconnect)
    return CommunicationTime(busy, exposed_by_cause(busy, compute_seconds, exposure))


def exposed_by_cause(
    busy: Mapping[Cause, float], compute_seconds: float, exposure: Exposure = EXPOSURE
) -> dict[Cause, float]:
    """What communication adds, from how long it takes."""
    beside = 0.0
    for cause, seconds in busy.items():
        if cause in OVERLAPPED:
            beside += seconds
    overlapped = max(exposure.overlapped, 1 - compute_seconds / beside) if beside > 0 else 0.0
    exposed = {}
    for cause, seconds in busy.items():
        if cause in OVERLAPPED:
            share = overlapped
        else:
            share = exposure.tensor_parallel if cause is Cause.TP else exposure.waited_for
        exposed[cause] = seconds * share
    return exposed


_MESH_CAUSES: Final[Mapping[str, Cause]] = MappingProxyType(
    {
        "fsdp": Cause.FSDP,
        "dp_shard": Cause.FSDP,
        "dp_shard_cp": Cause.FSDP,
        "efsdp": Cause.FSDP,
        "dp_replicate": Cause.HSDP,
        "tp": Cause.TP,
        "etp": Cause.TP,
        "cp": Cause.CP,
        "pp": Cause.PP,
        "ep": Cause.EP,
    }
)


def cause_of(dims: ParallelDims, op: Op, group_size: int, stride: int, mesh_dim: str | None = None) -> Cause:
    """The parallelism behind a group, by the name of its mesh dimension or by its shape.

    torchtitan lays ranks out as pp, dp_replicate, dp_shard, cp, tp, the last varying fastest. A group that
    serves both (cp with one shard: parameters, and keys and values) counts as FSDP's.
    """
    cause = _MESH_CAUSES.get(mesh_dim or "")
    if cause is None:
        cause = _cause_by_shape(dims, op, group_size, stride)
    return Cause.DDP if cause is Cause.HSDP and dims.fsdp_degree == 1 else cause


def _cause_by_shape(dims: ParallelDims, op: Op, group_size: int, stride: int) -> Cause:
    if op.is_p2p:
        return Cause.PP
    if op is Op.ALL_TO_ALL:
        return Cause.EP if dims.ep > 1 else Cause.CP
    shapes: Sequence[tuple[Cause, int, int]] = (
        (Cause.TP, dims.tp, 1),
        (Cause.FSDP, dims.fsdp_degree, dims.tp),
        (Cause.CP, dims.cp, dims.tp),
        (Cause.HSDP, dims.dp_replicate, dims.tp * dims.fsdp_degree),
    )
    for cause, size, distance in shapes:
        if size > 1 and (group_size, stride) == (size, distance):
            return cause
    # what is left of the gathers and scatters are the experts' own shards
    return Cause.FSDP if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) and dims.ep > 1 else Cause.OTHER
