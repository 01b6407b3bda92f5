"""The text of a torchtitan 0.2.2 log as data. Pure: text in, frozen dataclasses out; no text makes it raise.

A line may carry, outermost first: an ``srun --label`` prefix, torchrun's ``[rank3]:`` (``--tee``), torch's own
``[rank3]: `` (tracebacks), then torchtitan's, glog's or c10d's header. All go; what they say is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from titan_tune.titan.tracebacks import FailedWorker, RaisedError, read_failures

ANSI: Final = re.compile(r"\x1b?\[\d{1,3}(?:;\d{1,3})*m|\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours, also where a viewer has eaten the escape character, and the other control sequences."""

_SRUN_LABEL: Final = re.compile(r" *\d{1,5}: ?")
_RANK: Final = re.compile(r"\[[A-Za-z_]*(\d{1,7})\]: ?")
_TITAN: Final = re.compile(
    r"\[titan\] (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,(\d{3}))? - \S+ - ([A-Z]+) - (.*)", re.DOTALL
)
_GLOG: Final = re.compile(r"\[?([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ (?:\d+ )?(\S+:\d+\] .*)", re.DOTALL)
_C10D: Final = re.compile(r"\[([IWEF])\d{3,4} \d\d:\d\d:\d\d\.\d+ (\S+:\d+\] .*)", re.DOTALL)
_LETTER_LEVELS: Final = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "ERROR"}

_NUMBER: Final = r"[+-]?(?:\d[\d,]*\.?\d*(?:e[+-]?\d+)?|\.\d+|nan|inf)"
_STEP: Final = re.compile(
    rf"step:\s*(?P<step>\d[\d,]*)\s+loss:\s*(?P<loss>{_NUMBER})\s+grad_norm:\s*(?P<grad_norm>{_NUMBER})\s+"
    rf"memory:\s*(?P<gib>{_NUMBER})GiB\((?P<percent>{_NUMBER})%\)\s+tps:\s*(?P<tps>{_NUMBER})\s+"
    rf"tflops:\s*(?P<tflops>{_NUMBER})\s+mfu:\s*(?P<mfu>{_NUMBER}%|N/A)"
)
"""torchtitan/components/metrics.py, ``MetricsProcessor.log``; ``N/A`` is 0.3's, for quantized models."""


class Milestone(StrEnum):
    """What a run passes on its way. The values are the texts that torchtitan logs."""

    VERSION = "torchtitan version: "
    STARTING = "Starting job: "
    CONFIG = "Running with configs: "
    BUILDING = "Building "
    MESH = "Building device mesh with parallelism: "
    CAPACITY = " capacity: "
    MODEL_SIZE = "Model "
    FLOAT8 = "Float8 "
    SWAPPED_FLOAT8 = "Swapped to Float8Linear layers"
    MX = "MX training active"
    APPLIED = "Applied "
    COMPILING = "Compiling each TransformerBlock with torch.compile"
    COMPILING_LOSS = "Compiling the loss function with torch.compile"
    PIPELINE = "Using pipeline schedule "
    MODEL_MEMORY = " memory usage for model: "
    MIXED_PRECISION = "Mixed precision training is "
    INITIALIZED = "Trainer is initialized with "
    TRAINING_STARTS = "Training starts at step "
    ASYNC_TP = "Async TP is enabled"
    COMPLETED = "Training completed"
    PROCESS_GROUP_DESTROYED = "Process group destroyed"


_MILESTONES: Final = (
    (re.compile(r"Building device mesh with parallelism: "), Milestone.MESH),
    (re.compile(r"Building \S+ .*with \{", re.DOTALL), Milestone.BUILDING),
    (re.compile(r"\w+ capacity: .* with [\d.]+GiB memory"), Milestone.CAPACITY),
    (re.compile(r"Model .*size: [\d,]+ total parameters"), Milestone.MODEL_SIZE),
    (re.compile(r"Float8 (?:training|tensorwise scaled training) active"), Milestone.FLOAT8),
    (re.compile(r"\w+ memory usage for model: "), Milestone.MODEL_MEMORY),
    *(
        (re.compile(re.escape(milestone.value)), milestone)
        for milestone in Milestone
        if milestone
        not in (
            Milestone.MESH,
            Milestone.BUILDING,
            Milestone.CAPACITY,
            Milestone.MODEL_SIZE,
            Milestone.FLOAT8,
            Milestone.MODEL_MEMORY,
        )
    ),
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line without its prefixes. ``number`` counts from 1 in ``source``."""

    number: int
    text: str
    rank: int | None = None
    level: str = ""
    """INFO, WARNING, ERROR, …; empty where the line has no header of a logger."""
    time: datetime | None = None
    source: str = ""
    """The file, where several were read together."""
    is_titan: bool = False


@dataclass(frozen=True, slots=True)
class StepLine:
    """One ``step:`` line. Memory is the peak *reserved* since the line before it."""

    step: int
    loss: float
    grad_norm: float
    memory_gib: float
    memory_percent: float
    tps: float
    """Tokens per second per device."""
    tflops: float
    mfu_percent: float | None
    line: LogLine = field(default=LogLine(0, ""), compare=False)

    @property
    def has_loss(self) -> bool:
        """Whether the rank has a loss: pipeline stages before the last print -1 for every accumulation step."""
        return not (self.loss < 0 and self.loss.is_integer())


@dataclass(frozen=True, slots=True)
class ParsedLog:
    """What a log says, in the order of its lines."""

    num_lines: int = 0
    lines: tuple[LogLine, ...] = ()
    """Every line that is not blank and not a step line."""
    steps: tuple[StepLine, ...] = ()
    milestones: tuple[tuple[Milestone, LogLine], ...] = ()
    warnings: tuple[LogLine, ...] = ()
    """Lines that a logger marked WARNING or worse."""
    errors: tuple[RaisedError, ...] = ()
    failed_workers: tuple[FailedWorker, ...] = ()
    """torchrun's table of failures."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration by dotted key, where ``job.print_config`` had it printed."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    float8_linear_modules: int | None = None
    """Modules that are ``Float8Linear``, where something said how many."""

    @property
    def is_titan(self) -> bool:
        """Whether torchtitan wrote any of it."""
        return bool(self.steps) or any(line.is_titan for line in self.lines)

    def first(self, milestone: Milestone, containing: str = "") -> LogLine | None:
        """The first line of a milestone whose text contains ``containing``."""
        return next(
            (line for kind, line in self.milestones if kind is milestone and containing in line.text), None
        )

    def find(self, pattern: str | re.Pattern[str]) -> LogLine | None:
        """The first line in which ``pattern`` is found."""
        compiled = re.compile(pattern)
        return next((line for line in self.lines if compiled.search(line.text)), None)


def strip_ansi(text: str) -> str:
    """``text`` without colours and cursor movements."""
    return ANSI.sub("", text) if "[" in text else text


def parse_step(text: str) -> StepLine | None:
    """The numbers of a step line, or ``None`` for any other text. Colours are ignored."""
    match = _STEP.search(strip_ansi(text))
    if match is None:
        return None
    mfu = match["mfu"]
    return StepLine(
        step=int(match["step"].replace(",", "")),
        loss=_number(match["loss"]),
        grad_norm=_number(match["grad_norm"]),
        memory_gib=_number(match["gib"]),
        memory_percent=_number(match["percent"]),
        tps=_number(match["tps"]),
        tflops=_number(match["tflops"]),
        mfu_percent=None if mfu == "N/A" else _number(mfu.rstrip("%")),
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def parse_log(text: str, *, source: str = "", rank: int | None = None) -> ParsedLog:
    """Read one log file. ``rank`` is whose it is, for lines that do not say."""
    raw = text.split("\n")
    labelled = _has_srun_labels(raw)
    lines = [
        line
        for number, content in enumerate(raw, 1)
        if (line := _read_line(content, number, source, rank, labelled=labelled)) is not None
    ]
    return _assemble(lines, num_lines=len(raw) - (raw[-1] == ""))


def merge(logs: Sequence[ParsedLog]) -> ParsedLog:
    """Logs of one run (a file a rank) as one. Torchtitan's lines are ordered by time, ties by file."""
    if len(logs) == 1:
        return logs[0]
    configured = next((log for log in logs if log.config), ParsedLog())
    built = next((log for log in logs if log.model_args), ParsedLog())
    return ParsedLog(
        num_lines=sum(log.num_lines for log in logs),
        lines=tuple(line for log in logs for line in log.lines),
        steps=tuple(step for log in logs for step in log.steps),
        milestones=tuple(milestone for log in logs for milestone in log.milestones),
        warnings=tuple(line for log in logs for line in log.warnings),
        errors=tuple(
            sorted((e for log in logs for e in log.errors), key=lambda e: (e.is_summary, e.time or ""))
        ),
        failed_workers=tuple(worker for log in logs for worker in log.failed_workers),
        config=configured.config,
        model_args=built.model_args,
        float8_linear_modules=next(
            (log.float8_linear_modules for log in logs if log.float8_linear_modules is not None), None
        ),
    )


def _has_srun_labels(raw: Sequence[str]) -> bool:
    sample = [line for line in raw[:400] if line.strip()]
    return bool(sample) and sum(bool(_SRUN_LABEL.match(line)) for line in sample) > 0.9 * len(sample)


def _read_line(content: str, number: int, source: str, rank: int | None, *, labelled: bool) -> LogLine | None:
    text = strip_ansi(content).rstrip()
    if labelled:
        text = _SRUN_LABEL.sub("", text, count=1)
    while (match := _RANK.match(text)) is not None:
        rank, text = int(match[1]), text[match.end() :]
    if not text.strip():
        return None
    if (match := _TITAN.match(text)) is not None:
        return LogLine(number, match[4], rank, match[3], _time(match[1], match[2]), source, is_titan=True)
    if (match := _C10D.match(text) or _GLOG.match(text)) is not None:
        return LogLine(number, match[2], rank, _LETTER_LEVELS[match[1]], None, source)
    return LogLine(number, text, rank, "", None, source)


def _time(seconds: str, milliseconds: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(f"{seconds}.{milliseconds or '000'}")
    except ValueError:  # 2026-99-99: no logger's
        return None


def _assemble(lines: Iterable[LogLine], *, num_lines: int) -> ParsedLog:
    kept: list[LogLine] = []
    steps: list[StepLine] = []
    milestones: list[tuple[Milestone, LogLine]] = []
    for line in lines:
        step = parse_step(line.text) if "step:" in line.text else None
        if step is not None:
            steps.append(_at(step, line))
            continue
        kept.append(line)
        milestone = _milestone(line)
        if milestone is not None:
            milestones.append((milestone, line))
    errors, failed_workers = read_failures(kept)
    configs = [line for milestone, line in milestones if milestone is Milestone.CONFIG]
    builds = [line for milestone, line in milestones if milestone is Milestone.BUILDING]
    return ParsedLog(
        num_lines=num_lines,
        lines=tuple(kept),
        steps=tuple(steps),
        milestones=tuple(milestones),
        warnings=tuple(line for line in kept if line.level in ("WARNING", "ERROR", "CRITICAL")),
        errors=errors,
        failed_workers=failed_workers,
        config=_flat(_json_after(kept, configs[0])) if configs else {},
        model_args=_json_after(kept, builds[0]) if builds else {},
        float8_linear_modules=_float8_modules(kept),
    )


def _at(step: StepLine, line: LogLine) -> StepLine:
    return StepLine(
        step.step,
        step.loss,
        step.grad_norm,
        step.memory_gib,
        step.memory_percent,
        step.tps,
        step.tflops,
        step.mfu_percent,
        line,
    )


def _milestone(line: LogLine) -> Milestone | None:
    if not line.is_titan:
        return None
    return next((milestone for pattern, milestone in _MILESTONES if pattern.match(line.text)), None)


def _json_after(lines: Sequence[LogLine], start: LogLine) -> dict[str, Any]:
    """The JSON object that begins on ``start`` and goes on over the next lines of its rank."""
    opening = start.text[start.text.find("{") :]
    following = (
        line.text
        for line in lines
        if line.source == start.source
        and line.number > start.number
        and line.rank == start.rank
        and not line.is_titan
    )
    parts = [opening]
    for text in following:
        parts.append(text)
        if text == "}":
            break
    try:
        value = json.loads("\n".join(parts))
    except ValueError:  # cut short, or another rank wrote in between
        return {}
    return value if isinstance(value, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _float8_modules(lines: Sequence[LogLine]) -> int | None:
    """Count in the model that ``model.print_after_conversion`` prints; ``None`` where there is none."""
    start = next((line for line in lines if line.text.startswith("Model definion after conversion")), None)
    if start is None:
        return None
    printed = (line for line in lines if line.source == start.source and line.number > start.number)
    count = 0
    for line in printed:
        if line.rank != start.rank:
            continue
        if line.is_titan:
            break
        # "(0-5): 6 x TransformerBlock(" stands for as many
        count += line.text.count("Float8Linear(")
    return count
