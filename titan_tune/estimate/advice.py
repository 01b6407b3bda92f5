"""What would make a job fit, and on how few GPUs it fits as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.settings import AcMode, ActivationCheckpointing, Compilation, ParallelDims, Settings
from titan_tune.errors import InputError
from titan_tune.estimate.memory import estimate_memory
from titan_tune.estimate.step_time import estimate_step_time

MAX_GPUS = 1 << 16
MAX_SUGGESTIONS = 6
MAX_CHANGES = 3
"""At once."""
SPEED_TOLERANCE = 0.1
"""A suggestion that asks for more must be faster by more than this: predictions are no better."""
_Validity = Callable[[Settings, Mapping[str, Any]], bool]


def _always(settings: Settings, values: Mapping[str, Any]) -> bool:
    return True


OP_AC = ActivationCheckpointing(mode=AcMode.SELECTIVE, every=0)
FULL_AC = ActivationCheckpointing(mode=AcMode.FULL)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change of the job and what it would then need."""

    values: tuple[tuple[str, Any], ...]
    """torchtitan keys and their new values."""
    settings: Settings
    memory: MemoryEstimate
    tokens_per_second_per_gpu: float
    changes_numerics: bool = False
    num_changes: int = 1
    """Changes at once; one may take several keys."""

    @property
    def text(self) -> str:
        """The change as ``key = value`` pairs; empty where only the number of GPUs changes."""
        return ", ".join(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """One ``key = value`` each."""
        return tuple(f"{key} = {_toml(value)}" for key, value in self.values)

    @property
    def gpus(self) -> int:
        """Ranks that the changed job needs."""
        return self.settings.dims.world_size


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def minimum_gpus(settings: Settings, *, is_valid: _Validity = _always) -> int | None:
    """Fewest GPUs on which the job is sure to run as it is, or ``None`` when no number is enough.

    Only ``dp_shard`` changes, over powers of two (what nodes and batches divide into) and its own
    value; every other degree stays. ``is_valid`` is asked about every size and its changed key.
    """
    others = settings.dims.world_size // settings.dims.dp_shard
    shards = {1 << power for power in range(MAX_GPUS.bit_length())} | {settings.dims.dp_shard}
    for shard in sorted(shards):
        if shard * others > MAX_GPUS:
            return None
        resized = with_shards(settings, shard)
        if _fits(resized) and is_valid(resized, dict(_shard_values(resized.dims))):
            return shard * others
    return None


def with_shards(settings: Settings, dp_shard: int) -> Settings:
    """The same job on a cluster of the size that ``dp_shard`` makes it.

    The accumulation steps stay as they are, so the global batch grows with the ranks.
    """
    dims = replace(settings.dims, dp_shard=dp_shard)
    cluster = settings.cluster
    per_node = min(dims.world_size, max(cluster.gpus_per_node, 1))
    nodes = -(-dims.world_size // per_node)
    resized = cluster.model_copy(update={"num_nodes": nodes, "gpus_per_node": per_node})
    batch = settings.gradient_accumulation_steps * settings.local_batch_size * dims.dp_degree
    return replace(settings, dims=dims, cluster=resized, global_batch_size=batch)


def _fits(settings: Settings) -> bool:
    try:
        return is_sure_to_run(estimate_memory(settings))
    except InputError:
        return False


def is_sure_to_run(memory: MemoryEstimate) -> bool:
    """Whether also the upper end of the interval fits: advice promises more than a verdict."""
    return memory.active_interval[1] + memory.outside_bytes <= memory.capacity_bytes


def suggestions(
    settings: Settings,
    *,
    is_valid: _Validity = _always,
    limit: int = MAX_SUGGESTIONS,
) -> tuple[Suggestion, ...]:
    """Changes that make the job fit, on the fewest GPUs and fastest predicted first; those that
    change numerics last.

    ``is_valid`` is asked about every changed job and its changed keys. Two changes at once are tried
    only when no single one that keeps the numerics is enough (fits without pressure), and three when no
    two are.
    """
    found: list[Suggestion] = []
    level = [_Change((), settings, number=0)]
    for _ in range(MAX_CHANGES):
        level = _extended(level)
        found += [s for change in level if (s := _suggestion(settings, change, is_valid)) is not None]
        if any(not s.changes_numerics and s.memory.verdict is Verdict.FITS for s in found):
            break
        level = [change for change in level if not change.changes_numerics]
    found.sort(key=lambda s: (s.changes_numerics, s.gpus, -s.tokens_per_second_per_gpu))
    best: dict[tuple[frozenset[str], Verdict], Suggestion] = {}
    for suggestion in found:  # the mildest of those that turn the same keys
        best.setdefault((frozenset(k for k, _ in suggestion.values), suggestion.memory.verdict), suggestion)
    kept = [s for s in best.values() if not any(_makes_needless(other, s) for other in best.values())]
    return tuple(kept)[:limit]


def _makes_needless(one: Suggestion, other: Suggestion) -> bool:
    """Whether ``one`` asks for no more than ``other`` in any respect and for less in one, and is about as
    fast."""
    asked = [
        (s.changes_numerics, s.memory.verdict is Verdict.PRESSURE, s.gpus, s.num_changes)
        for s in (one, other)
    ]
    no_more = all(mine <= theirs for mine, theirs in zip(*asked, strict=True))
    floor = (1 - SPEED_TOLERANCE) * other.tokens_per_second_per_gpu
    return no_more and asked[0] != asked[1] and one.tokens_per_second_per_gpu >= floor


@dataclass(frozen=True, slots=True)
class _Change:
    values: tuple[tuple[str, Any], ...]
    settings: Settings
    changes_numerics: bool = False
    number: int = 1


def _suggestion(before: Settings, change: _Change, is_valid: _Validity) -> Suggestion | None:
    """The change with its figures, if it is valid, fits and does something."""
    if change.settings == before or not is_valid(change.settings, dict(change.values)):
        return None
    try:
        memory = estimate_memory(change.settings)
        if not is_sure_to_run(memory):
            return None
        speed = estimate_step_time(change.settings).tokens_per_second_per_gpu
    except InputError:
        return None
    return Suggestion(change.values, change.settings, memory, speed, change.changes_numerics, change.number)


def _extended(changes: Sequence[_Change]) -> list[_Change]:
    """Each change with one more on top, of other keys; the same keys and values only once."""
    extended: dict[str, _Change] = {}
    for first in changes:
        taken = {key for key, _ in first.values}
        for second in _single_changes(first.settings):
            if taken.isdisjoint(key for key, _ in second.values):
                values = (*first.values, *second.values)
                change = _Change(values, second.settings, second.changes_numerics, first.number + 1)
                extended.setdefault(repr(sorted(values)), change)
    return list(extended.values())


def _single_changes(s: Settings) -> Iterator[_Change]:
    yield from _checkpointing_changes(s)
    if not (s.compile.model and s.compile.loss):
        compiled = Compilation(model=True, loss=True, mode=s.compile.mode)
        yield _Change(
            (("compile.enable", True), ("compile.components", ["model", "loss"])),
            replace(s, compile=compiled),
        )
    yield from _batch_changes(s)
    yield from _layout_changes(s)
    if not s.cpu_offload and s.dims.fsdp_degree > 1:
        yield _Change((("training.enable_cpu_offload", True),), replace(s, cpu_offload=True))
    if s.dtype == "float32":
        yield _Change((("training.dtype", "bfloat16"),), replace(s, dtype="bfloat16"), changes_numerics=True)


def _checkpointing_changes(s: Settings) -> Iterator[_Change]:
    mode, every = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    is_op = s.ac.mode is AcMode.SELECTIVE and s.ac.every == 0
    if not is_op and s.ac.mode is not AcMode.FULL:
        yield _Change(((mode, "selective"), (every, "op")), replace(s, ac=OP_AC))
    if s.ac.mode is not AcMode.FULL:
        yield _Change(((mode, "full"),), replace(s, ac=FULL_AC))


def _batch_changes(s: Settings) -> Iterator[_Change]:
    """Smaller local batches at the same global batch (more accumulation steps)."""
    batch = s.local_batch_size // 2
    smallest = s.pipeline.microbatch_size * s.dims.pp if s.dims.pp > 1 else 1
    while batch >= smallest and s.local_batch_size % batch == 0:
        yield _Change(
            (("training.local_batch_size", batch), ("training.global_batch_size", s.global_batch_size)),
            replace(s, local_batch_size=batch),
        )
        if batch % 2:
            return
        batch //= 2


def _layout_changes(s: Settings) -> Iterator[_Change]:
    """The same GPUs cut differently, then more of them."""
    dims, model = s.dims, s.model
    if dims.dp_replicate > 1:
        yield _shards(s, replace(dims, dp_replicate=1, dp_shard=dims.dp_shard * dims.dp_replicate))
    for tp in (2, 4, 8):
        fits_heads = model.n_kv_heads % tp == 0 and model.n_heads % tp == 0
        if dims.tp == 1 and fits_heads and dims.dp_shard % tp == 0 and dims.dp_shard > tp:
            smaller = replace(dims, tp=tp, dp_shard=dims.dp_shard // tp)
            accumulates = s.global_batch_size % (s.local_batch_size * smaller.dp_degree) == 0
            if accumulates and s.seq_len % (2 * tp * dims.cp) == 0:
                values = (("parallelism.tensor_parallel_degree", tp), *_shard_values(smaller))
                yield _Change(values, replace(s, dims=smaller))
    for factor in (2, 4, 8, 16, 32, 64):
        larger = with_shards(s, dims.dp_shard * factor)
        if larger.dims.world_size <= MAX_GPUS:
            yield _Change(_shard_values(larger.dims), larger)


def _shards(s: Settings, dims: ParallelDims) -> _Change:
    values = (("parallelism.data_parallel_replicate_degree", dims.dp_replicate), *_shard_values(dims))
    return _Change(values, replace(s, dims=dims))


def _shard_values(dims: ParallelDims) -> tuple[tuple[str, Any], ...]:
    return (("parallelism.data_parallel_shard_degree", dims.dp_shard),)
