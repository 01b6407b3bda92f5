"""Tracebacks of each rank in a log, and torchrun's table of the workers that failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from titan_tune.titan.logs import LogLine

_HEADER: Final = re.compile(r"(?P<indent>\s*)(?P<label>\S.*?)?Traceback \(most recent call last\):")
_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>.*))?')
_RAISED: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<message>.*))?", re.DOTALL)
_CHAIN: Final = re.compile(
    r"\s*(?:During handling of the above exception, another exception occurred|"
    r"The above exception was the direct cause of the following exception)"
)
_SUMMARY_LABEL: Final = re.compile(r"\s*traceback +: ?")
_TABLE_END: Final = re.compile(r"(?:-{20,}|={20,})$")
_ROOT_CAUSE: Final = "Root Cause (first observed failure):"
_TABLE_ROW: Final = re.compile(r"\s+(?P<key>time|host|rank|exitcode) +: (?P<value>.*)")
_EXIT_CODE: Final = re.compile(r"(-?\d+) \(pid: (\d+)\)")

MAX_MESSAGE_LINES: Final = 40


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class RaisedError:
    """One exception that ended something, outermost first in ``frames``."""

    type: str
    """As printed: ``RuntimeError``, ``torch.OutOfMemoryError``; empty where the log ends before it."""
    message: str
    frames: tuple[Frame, ...] = ()
    rank: int | None = None
    number: int = 0
    """The line that names the exception."""
    source: str = ""
    is_summary: bool = False
    """Repeated by the launcher after the workers ended."""
    causes: tuple[RaisedError, ...] = ()
    """Exceptions it was raised while handling, first first."""
    time: float | None = None
    """Unix time, where something recorded it."""
    phase: str = ""
    """What the rank was doing, where something recorded it."""

    @property
    def text(self) -> str:
        """``type: message`` of the whole chain, a line each; what rules look at."""
        return "\n".join(f"{e.type}: {e.message}" for e in (*self.causes, self))

    @property
    def all_frames(self) -> tuple[Frame, ...]:
        """Frames of the whole chain."""
        return tuple(frame for e in (*self.causes, self) for frame in e.frames)


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """One entry of torchrun's table. ``exit_code`` is negative for a signal."""

    rank: int
    exit_code: int
    host: str
    time: str
    is_root: bool
    number: int
    source: str = ""


def read_failures(lines: Sequence[LogLine]) -> tuple[tuple[RaisedError, ...], tuple[FailedWorker, ...]]:
    """Every traceback, the launcher's repetitions last, and torchrun's table."""
    streams: dict[tuple[str, int | None], list[LogLine]] = {}
    for line in lines:
        streams.setdefault((line.source, line.rank), []).append(line)
    errors = [error for stream in streams.values() for error in _chained(_errors(stream))]
    errors.sort(key=lambda error: (error.is_summary, error.source, error.number))
    workers = [worker for stream in streams.values() for worker in _workers(stream)]
    return tuple(errors), tuple(workers)


def _chained(errors: Iterable[tuple[RaisedError, bool]]) -> Iterator[RaisedError]:
    """Join an exception with those it was raised from."""
    pending: RaisedError | None = None
    for error, follows in errors:
        if pending is not None and follows:
            error = replace(error, causes=(*pending.causes, replace(pending, causes=())))
        elif pending is not None:
            yield pending
        pending = error
    if pending is not None:
        yield pending


def _errors(lines: Sequence[LogLine]) -> Iterator[tuple[RaisedError, bool]]:
    """(exception, whether it was raised while handling the one before)."""
    index, follows, worker_rank = 0, False, None
    while index < len(lines):
        line = lines[index]
        header = _HEADER.match(line.text)
        if header is None:
            row = _TABLE_ROW.match(line.text)
            if row is not None and row["key"] == "rank":
                worker_rank = _first_int(row["value"])
            follows = follows or _CHAIN.match(line.text) is not None
            index += 1
            continue
        label = header["label"] or ""
        in_table = _SUMMARY_LABEL.match(label + " ") is not None or label.startswith("traceback ")
        error, index = _read_error(lines, index + 1, indent=header["indent"])
        if in_table or error.type.endswith("ChildFailedError"):
            error = replace(error, is_summary=True, rank=worker_rank if in_table else error.rank)
        yield error, follows or label.startswith("Original ")
        follows = False


def _read_error(lines: Sequence[LogLine], index: int, *, indent: str) -> tuple[RaisedError, int]:
    """The traceback whose header is before ``index``, and the index after it."""
    frames: list[Frame] = []
    start = lines[index - 1]
    while index < len(lines):
        line = lines[index]
        text = line.text.removeprefix(indent)
        if line.is_titan or line.level:
            break
        frame = _FRAME.match(text)
        if frame is not None:
            frames.append(Frame(frame["file"], _bounded(frame["line"]), frame["function"] or ""))
        elif not text[:1].isspace():
            raised = _RAISED.fullmatch(text)
            if raised is None:
                break
            message, index = _message(lines, index, raised["type"], raised["message"] or "", indent)
            error = RaisedError(raised["type"], message, tuple(frames), line.rank, line.number, line.source)
            return error, index
        index += 1
    return RaisedError("", "", tuple(frames), start.rank, start.number, start.source), index


def _message(
    lines: Sequence[LogLine], index: int, type_name: str, first: str, indent: str
) -> tuple[str, int]:
    """The message that starts on line ``index`` with ``first``, and the index after it."""
    parts = [first]
    index += 1
    if type_name.endswith("ChildFailedError"):  # what follows is the table
        return first, index
    while index < len(lines) and len(parts) < MAX_MESSAGE_LINES:
        line = lines[index]
        text = line.text
        ends = (
            line.is_titan or line.level or _HEADER.match(text) or _CHAIN.match(text) or _TABLE_END.match(text)
        )
        if ends or not text.startswith(indent):
            break
        parts.append(text.removeprefix(indent).rstrip())
        index += 1
    return "\n".join(parts).strip(), index


def _workers(lines: Sequence[LogLine]) -> Iterator[FailedWorker]:
    """torchrun's table; the root cause is the entry after its heading."""
    row: dict[str, str] = {}
    is_root = False
    for line in lines:
        if line.text.strip() == _ROOT_CAUSE:
            is_root = True
        match = _TABLE_ROW.match(line.text)
        if match is None:
            continue
        row[match["key"]] = match["value"].strip()
        if match["key"] != "exitcode":
            continue
        code, rank = _EXIT_CODE.match(row["exitcode"]), _first_int(row.get("rank", ""))
        if code is not None and rank is not None:
            yield FailedWorker(
                rank,
                _bounded(code[1]),
                row.get("host", ""),
                row.get("time", ""),
                is_root,
                line.number,
                line.source,
            )
        row, is_root = {}, False


def _first_int(text: str) -> int | None:
    match = re.match(r"\d{1,9}", text)
    return int(match[0]) if match else None


def _bounded(digits: str) -> int:
    """An int from a log: Python refuses to convert thousands of digits."""
    return int(digits[:18])
