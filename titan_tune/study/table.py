"""Exhaustive tables: every candidate of a space, measured, so that searches can be compared without a GPU.

A table is a JSONL file. Its first line says what was measured (``kind = "table"``, the space, the hardware);
every further line is one probe (benchmarks/measure_table.py writes them). A configuration may have several
lines: its repeats tell noise from difference.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeSpec, ProbeStatus, RankMemory
from titan_tune.errors import InputError
from titan_tune.probe.statistics import MINIMUM_TO_JUDGE, cannot_win
from titan_tune.study.pool import PoolItem


class _Line(BaseModel):
    """Frozen; what a later writer adds is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TableHeader(_Line):
    """What a table was measured on."""

    kind: str = Field(pattern="^table$")
    space: str
    """The space file, relative to the repository."""
    gpu: str
    gpus: PositiveInt
    """GPUs of one probe."""
    date: str
    torch: str
    torchtitan: str = ""
    baseline: str | None = None
    """Config id of the job as it was."""
    run_noise: NonNegativeFloat | None = None
    """Standard deviation of the logarithm between runs of one configuration, where known without repeats."""


class TableRow(_Line):
    """One probe."""

    config_id: str
    choices: Mapping[str, str]
    values: Mapping[str, Value] = {}
    status: ProbeStatus
    message: str = ""
    seconds: PositiveFloat
    """Wall clock of the whole probe."""
    tokens_per_second_per_gpu: PositiveFloat | None = None
    interval: tuple[float, float] | None = None
    step_tokens_per_second: tuple[PositiveFloat, ...] = ()
    """Tokens/s per GPU of every measured step, warm-up left out."""
    time_to_first_step: NonNegativeFloat | None = None
    memory: tuple[tuple[int, int, int, int], ...] = ()
    """Of each rank: its number, peak active, reserved and device bytes."""

    @property
    def is_measured(self) -> bool:
        """Whether the probe ended with a throughput."""
        return self.status is ProbeStatus.COMPLETED and self.tokens_per_second_per_gpu is not None


@dataclass(frozen=True)
class MeasuredTable:
    """A whole table; ``rows`` in file order, repeats after the first row of a configuration."""

    name: str
    header: TableHeader
    rows: tuple[TableRow, ...]

    @cached_property
    def by_config(self) -> Mapping[str, tuple[TableRow, ...]]:
        """Config id to its rows, in the order of their first probes."""
        found: dict[str, list[TableRow]] = {}
        for row in self.rows:
            found.setdefault(row.config_id, []).append(row)
        return {config: tuple(rows) for config, rows in found.items()}

    def truth(self, config_id: str) -> float | None:
        """Tokens/s per GPU of a configuration: the median of its probes' medians; ``None`` if it never ran."""
        speeds = [r.tokens_per_second_per_gpu for r in self.by_config[config_id] if r.is_measured]
        return statistics.median(s for s in speeds if s is not None) if speeds else None

    @cached_property
    def optimum(self) -> float:
        """The highest of all truths, tokens/s per GPU."""
        return max(speed for config in self.by_config if (speed := self.truth(config)) is not None)

    @cached_property
    def exhaustive_gpu_seconds(self) -> float:
        """GPU time of measuring every configuration once."""
        return self.header.gpus * sum(rows[0].seconds for rows in self.by_config.values())

    @cached_property
    def repeat_noise(self) -> float | None:
        """Standard deviation of the logarithm between probes of one configuration; ``None`` without repeats."""
        squares, degrees = 0.0, 0
        for rows in self.by_config.values():
            speeds = [r.tokens_per_second_per_gpu for r in rows if r.tokens_per_second_per_gpu]
            if len(speeds) > 1:
                mean = statistics.fmean(speeds)
                squares += sum((speed / mean - 1.0) ** 2 for speed in speeds)
                degrees += len(speeds) - 1
        return (squares / degrees) ** 0.5 if degrees else None


def stand_in(choices: Mapping[str, str], items: Iterable[PoolItem]) -> PoolItem:
    """Where a replay begins when the job as it was, with these ``choices``, has no row.

    The item that differs from it on the fewest axes; of several the slowest predicted, so that no search gets a
    head start.

    Raises:
        ValueError: there are no items.
    """

    def key(item: PoolItem) -> tuple[int, float, str]:
        axes = choices.keys() | item.choices.keys()
        different = sum(choices.get(axis) != item.choices.get(axis) for axis in axes)
        return different, item.predicted, item.config_id

    return min(items, key=key)


Line = TypeVar("Line", bound=_Line)


def read_table(path: Path) -> MeasuredTable:
    """Read a table.

    Raises:
        InputError: the file cannot be read, or a line is no header or row; the message names line and key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not lines:
        raise InputError(f'{path}: empty; the first line of a table is its header, {{"kind": "table", …}}')
    header = _parse(TableHeader, lines[0], f"{path}: line 1")
    rows = [_parse(TableRow, line, f"{path}: line {n}") for n, line in enumerate(lines[1:], start=2) if line]
    if not any(row.is_measured for row in rows):
        raise InputError(f"{path}: no row has status = completed and a tokens_per_second_per_gpu")
    return MeasuredTable(path.stem, header, tuple(rows))


def _parse(model: type[Line], text: str, where: str) -> Line:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the line"
        raise InputError(f"{where}: {key}: {first['msg']}") from error


DEFAULT_RUN_NOISE = 0.005
"""Between runs of one configuration on one machine where a table has no repeats: as steps vary on an H200 alone."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one replayed probe says."""

    status: ProbeStatus
    tokens_per_second: float | None
    """Per GPU; ``None`` unless completed."""
    seconds: float
    row: TableRow

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of a completed probe's throughput: as wide as its row's."""
        speed, own = self.tokens_per_second, self.row.tokens_per_second_per_gpu
        if speed is None or own is None:
            raise ValueError(f"{self.row.config_id}: a probe that measured nothing has no interval")
        low, high = self.row.interval or (own, own)
        return low * speed / own, high * speed / own

    @property
    def noise(self) -> float:
        """Standard error of the throughput as a fraction of it; 0 for a probe that measured nothing."""
        if self.tokens_per_second is None:
            return 0.0
        low, high = self.interval
        return (high - low) / (2 * 1.96) / self.tokens_per_second


class TableReplay:
    """Probes answered from a table, with noise as measured: each is a bootstrap of a configuration's step times.

    Where the table has repeats one of them is drawn, and the spread between all repeats of the table is added;
    otherwise what its header says, or ``DEFAULT_RUN_NOISE``. The same seed and order of probes give the same answers.
    Use ``ReplayRunner(TableReplay(table, seed=0).outcome_of)`` to run a whole search.
    """

    def __init__(self, table: MeasuredTable, *, seed: int) -> None:
        self.table = table
        self._random = random.Random(seed)
        known = (table.repeat_noise, table.header.run_noise, DEFAULT_RUN_NOISE)
        self._noise = next(noise for noise in known if noise is not None)

    def draw(self, config_id: str) -> Draw:
        """One probe of a configuration of the table."""
        rows = self.table.by_config[config_id]
        if not rows[0].is_measured:
            return Draw(rows[0].status, None, rows[0].seconds, rows[0])
        rows = tuple(row for row in rows if row.is_measured)
        truth = self.table.truth(config_id)
        row = self._random.choice(rows)
        own = row.tokens_per_second_per_gpu
        assert truth is not None and own is not None
        steps = row.step_tokens_per_second or (own,)
        resampled = statistics.median(self._random.choices(steps, k=len(steps)))
        run = math.exp(self._random.gauss(0.0, self._noise))
        return Draw(row.status, truth * run * resampled / statistics.median(steps), row.seconds, row)

    def outcome_of(self, spec: ProbeSpec) -> ProbeOutcome:
        """One probe as a runner tells it; one that cannot reach ``spec.beat`` ends after the fewest steps."""
        drawn = self.draw(spec.config_id)
        row, speed, seconds = drawn.row, drawn.tokens_per_second, drawn.seconds
        if speed is None:
            return ProbeOutcome(drawn.status, row.message, seconds)
        steps = len(row.step_tokens_per_second) or spec.settings.steps - spec.settings.warmup_steps
        step_seconds = spec.tokens_per_step_per_rank / speed
        # every replayed step is as fast as the median: the rule of the real probe, applied to that
        cut = cannot_win([speed] * MINIMUM_TO_JUDGE, spec.beat) and steps > MINIMUM_TO_JUDGE
        if cut:
            seconds -= (steps - MINIMUM_TO_JUDGE) * step_seconds
            steps = MINIMUM_TO_JUDGE
        measurement = Measurement(
            tokens_per_second_per_gpu=speed,
            interval=drawn.interval,
            step_seconds=step_seconds,
            measured_steps=steps,
            warmup_steps=spec.settings.warmup_steps,
            stopped_early=cut,
            time_to_first_step=row.time_to_first_step or 0.0,
            losses=(),
            memory=tuple(RankMemory(*numbers) for numbers in row.memory),
            alloc_retries=0,
        )
        return ProbeOutcome(drawn.status, row.message, max(seconds, 0.0), measurement)
