"""The files of one trial folder while its probe runs; ``record`` has the outcome."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from titan_tune.domain.probe import RankMemory, StepRecord
from titan_tune.probe.record import write_whole

CONFIG: Final = "config.toml"
COMMAND: Final = "command.txt"
ENVIRONMENT: Final = "environment.json"
LOG: Final = "stdout.log"
EXIT: Final = "exit.json"
LAUNCHER_LOGS: Final = "logs"
OUTPUTS: Final = "outputs"

_STEP_FIELDS: Final = tuple(f.name for f in fields(StepRecord))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``write_whole`` of indented JSON."""
    write_whole(path, json.dumps(value, indent=2, default=str) + "\n")


def set_aside(directory: Path, prefix: str) -> None:
    """Move what a run left in ``directory`` into the first free ``prefix{n}`` below it.

    Earlier such folders stay where they are.
    """
    left = [
        entry for entry in directory.iterdir() if not entry.is_dir() or entry.name in (LAUNCHER_LOGS, OUTPUTS)
    ]
    if not left:
        return
    number = 1
    while (target := directory / f"{prefix}{number}").exists():
        number += 1
    target.mkdir()
    for entry in left:
        shutil.move(entry, target / entry.name)


@dataclass(slots=True)
class RankLog:
    """One rank's ``metrics.rank*.jsonl``, read as it grows."""

    path: Path
    rank: int
    header: dict[str, Any] = field(default_factory=dict)
    compiler: dict[str, Any] = field(default_factory=dict)
    """The compiler's counters, as of the last line that has them."""
    first_compiler: dict[str, Any] = field(default_factory=dict)
    """The same after the first step."""
    steps: list[StepRecord] = field(default_factory=list)
    not_finite: bool = False
    """Whether a loss or a gradient norm was infinite or not a number."""
    ended: bool = False
    """Whether the last step is done and all is written."""
    _offset: int = 0

    def read_new(self) -> bool:
        """Take in the complete lines that were added; whether there were any."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return False  # set aside for the next attempt
        complete, newline, _ = added.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for line in complete.splitlines():
            self._take(json.loads(line))
        return bool(newline)

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "header":
            self.header = line
        elif kind == "step":
            self.steps.append(StepRecord(**{name: _number(line[name]) for name in _STEP_FIELDS}))
            self.not_finite |= any(isinstance(line[name], str) for name in ("loss", "grad_norm"))
        elif kind in ("compile", "end"):
            self.compiler = line
            self.ended = kind == "end"
            if kind == "compile":
                self.first_compiler = line


def _number(value: Any) -> Any:
    """``null`` and the names of non-finite floats, back as floats."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, str) else value


@dataclass(slots=True)
class Metrics:
    """All ranks' logs of one run, read incrementally."""

    directory: Path
    logs: dict[int, RankLog] = field(default_factory=dict)

    def read_new(self) -> bool:
        """Take in what was added since the last call; whether anything was."""
        for path in self.directory.glob("metrics.rank*.jsonl"):
            rank = int(path.name.removeprefix("metrics.rank").removesuffix(".jsonl"))
            self.logs.setdefault(rank, RankLog(path, rank))
        grown = [log.read_new() for log in self.logs.values()]
        return any(grown)

    def complete_steps(self, num_ranks: int) -> int:
        """Steps that every one of ``num_ranks`` ranks has finished."""
        if len(self.logs) < num_ranks:
            return 0
        return min(len(log.steps) for log in self.logs.values())

    def have_ended(self, num_ranks: int) -> bool:
        """Whether every one of ``num_ranks`` ranks has done its last step."""
        return len(self.logs) >= num_ranks and all(log.ended for log in self.logs.values())

    def slowest(self, num_ranks: int) -> tuple[StepRecord, ...]:
        """For each complete step the record of its slowest rank."""
        rows = range(self.complete_steps(num_ranks))
        return tuple(
            max((log.steps[i] for log in self.logs.values()), key=lambda record: record.step_seconds)
            for i in rows
        )

    def losses(self) -> tuple[float, ...]:
        """The loss of each step, from the ranks that have one (the last pipeline stage)."""
        logs = [log for log in self.logs.values() if log.header.get("has_loss", True)]
        return tuple(record.loss for record in max((log.steps for log in logs), key=len, default=[]))

    def has_diverged(self) -> bool:
        """Whether a loss or a gradient norm was not finite on any rank."""
        return any(log.not_finite for log in self.logs.values())

    def memory(self) -> tuple[RankMemory, ...]:
        """Peaks of every rank that finished a step."""
        return tuple(
            RankMemory(
                rank=rank,
                active_bytes=max(record.active_bytes for record in log.steps),
                reserved_bytes=max(record.reserved_bytes for record in log.steps),
                device_bytes=max(record.device_bytes for record in log.steps),
            )
            for rank, log in sorted(self.logs.items())
            if log.steps
        )


def read_errors(directory: Path) -> tuple[dict[str, Any], ...]:
    """The ``error.rank*.json`` records, in the order of rank."""
    return tuple(json.loads(path.read_text()) for path in sorted(directory.glob("error.rank*.json")))


def log_tail(directory: Path, *, max_bytes: int = 65536) -> str:
    """The end of ``stdout.log``; empty where there is none."""
    path = directory / LOG
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return file.read().decode(errors="replace")
