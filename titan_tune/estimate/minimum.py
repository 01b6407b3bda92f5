"""On how few GPUs a job fits as it is."""

from __future__ import annotations

from dataclasses import dataclass

from titan_tune.domain.candidate import Finding
from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.errors import InputError
from titan_tune.estimate.changes import MAX_GPUS, Asked, compute_dtype, is_sound, resized
from titan_tune.estimate.memory import estimate_memory
from titan_tune.titan import rules


@dataclass(frozen=True, slots=True)
class Minimum:
    """Fewest GPUs of those that were tried, each as ``titan-tune estimate`` of the same file answers there."""

    fits: int | None
    """Where the verdict is that it fits; ``None`` when it is nowhere."""
    pressure: int | None
    """Fewer than ``fits``: where it runs, but under pressure."""
    least: tuple[int, MemoryEstimate] | None
    """On how many GPUs one of them needs least, and its memory there."""
    refused: tuple[int, Finding] | None
    """The fewest GPUs beyond ``least`` on which the job is not valid, and why."""
    compute_dtype: str
    """Of the matrix products on ``fits`` GPUs."""


def minimum_gpus(asked: Asked) -> Minimum:
    """Only the sharded ranks change: as many as the job has, and powers of two (what batches divide into)."""
    settings = asked.settings
    others = settings.dims.world_size // settings.dims.dp_shard
    powers = (others << power for power in range(MAX_GPUS.bit_length()))
    sizes = {settings.dims.world_size, *(size for size in powers if size <= MAX_GPUS)}
    pressure, refused = None, None
    least: tuple[int, MemoryEstimate] | None = None
    for gpus in sorted(sizes):
        made = resized(asked, gpus)
        if made is None:
            continue
        if not is_sound(asked, made):
            finding = rules.first_invalid(made.settings, made.values)
            refused = refused or ((gpus, finding) if finding is not None else None)
            continue
        try:
            memory = estimate_memory(made.settings)
        except InputError:
            continue
        if least is None or memory.active_bytes < least[1].active_bytes:
            least, refused = (gpus, memory), None
        if memory.verdict is Verdict.FITS:
            return Minimum(gpus, pressure, least, None, compute_dtype(made.settings))
        if pressure is None and is_sure_to_run(memory):
            pressure = gpus
    return Minimum(None, pressure, least, refused, compute_dtype(settings))


def is_sure_to_run(memory: MemoryEstimate) -> bool:
    """Whether also the upper end of the interval fits: advice promises more than a verdict."""
    return memory.active_interval[1] + memory.outside_bytes <= memory.capacity_bytes
