"""What is measured, in order of use to the model: the time may run out before the end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from titan_tune.calibrate.result import MatmulKind
from titan_tune.estimate.collectives import Op
from titan_tune.units import MIB

FLOAT8_CAPABILITY: Final = (8, 9)
LINEARS: Final = (
    (2048, 2048),
    (2048, 8192),
    (8192, 2048),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
)
"""(inputs, outputs) of attention and feed-forward linears from 1B to 70B."""
TOKENS: Final = (16384, 4096, 2048)
"""Of a forward; the largest first."""
CPU_LINEARS: Final = ((128, 128), (128, 512), (512, 128))
"""Small: processors without bf16 instructions are thousands of times slower than a GPU."""
CPU_TOKENS: Final = (128, 32)
ATTENTION: Final = ((4, 32, 4096, 64), (2, 32, 8192, 128), (1, 32, 4096, 128))
"""(batch, heads, sequence, head_dim)."""
CPU_ATTENTION: Final = ((1, 2, 128, 32),)
COLLECTIVES: Final = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.SEND)
COLLECTIVE_BYTES: Final = (256 * MIB, 1 * MIB, 64 * MIB, 16 * MIB, 4 * MIB)
CPU_COLLECTIVE_BYTES: Final = (1 * MIB, 65536)
COPY_BYTES: Final = (1024 * MIB, 256 * MIB)
CPU_COPY_BYTES: Final = (16 * MIB,)
LONGEST_SECONDS: Final = 0.5
"""Of one measurement, so that a large budget does not make one figure of it."""


@dataclass(frozen=True, slots=True)
class MatmulTask:
    """A linear layer of one precision."""

    kind: MatmulKind
    tokens: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """A causal attention."""

    batch: int
    heads: int
    sequence: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A copy of so many bytes."""

    bytes: int


@dataclass(frozen=True, slots=True)
class LaunchTask:
    """Many operators that do nothing worth the while."""


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """A collective of all ranks."""

    op: Op
    bytes: int


Task = MatmulTask | AttentionTask | CopyTask | LaunchTask | CollectiveTask


def tasks(*, device: str, world_size: int, capability: tuple[int, int] | None) -> tuple[Task, ...]:
    """What to measure on ``world_size`` ranks of a ``cuda`` (of that compute capability) or ``cpu`` device."""
    is_cuda = device == "cuda"
    found: list[Task] = [CopyTask(size) for size in (COPY_BYTES if is_cuda else CPU_COPY_BYTES)]
    found.append(LaunchTask())
    kinds = _kinds(is_cuda, capability)
    tokens = TOKENS if is_cuda else CPU_TOKENS
    linears = LINEARS if is_cuda else CPU_LINEARS
    found += _matmuls(kinds, tokens[:1], linears)
    found.append(MatmulTask("float32", tokens[0], *linears[0]))
    sizes = COLLECTIVE_BYTES if is_cuda else CPU_COLLECTIVE_BYTES
    # the largest and the smallest message say most of rate and latency
    collectives = [CollectiveTask(op, size) for size in sizes for op in COLLECTIVES if world_size > 1]
    found += collectives[: 2 * len(COLLECTIVES)]
    found += [AttentionTask(*shape) for shape in (ATTENTION if is_cuda else CPU_ATTENTION)]
    found += collectives[2 * len(COLLECTIVES) :]
    found += _matmuls(kinds, tokens[1:], linears)
    return tuple(found)


def _kinds(is_cuda: bool, capability: tuple[int, int] | None) -> Sequence[MatmulKind]:
    if is_cuda and capability is not None and capability >= FLOAT8_CAPABILITY:
        return ("bfloat16", "float8_tensorwise", "float8_rowwise")
    return ("bfloat16",)


def _matmuls(
    kinds: Sequence[MatmulKind], tokens: Sequence[int], linears: Sequence[tuple[int, int]]
) -> Iterator[Task]:
    for count in tokens:
        for inputs, outputs in linears:
            for kind in kinds:
                yield MatmulTask(kind, count, inputs, outputs)


def seconds_each(budget_seconds: float, num_tasks: int) -> float:
    """Time for one measurement so that all fit, warm-up included in the other half."""
    return min(LONGEST_SECONDS, 0.5 * budget_seconds / max(1, num_tasks))
