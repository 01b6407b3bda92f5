"""``titan-tune diagnose``: a log, a folder of logs, or the folder of a titan-tune trial."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from titan_tune.diagnose import Diagnosis, RunFacts, Severity, diagnose, run_facts
from titan_tune.errors import InputError
from titan_tune.titan.logs import ParsedLog, merge, parse_log
from titan_tune.titan.tracebacks import Frame, RaisedError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Final = 1
MAX_BYTES: Final = 1 << 30
MAX_FILES: Final = 4096
LOG_SUFFIXES: Final = (".log", ".out", ".err", ".txt")
STDOUT, OUTCOME = "stdout.log", "outcome.json"
COMPLETED, CANCELLED = "completed", "cancelled"
ENDED_BY_THE_RUNNER: Final = (COMPLETED, CANCELLED, "diverged", "hang", "timeout")
"""Statuses of probes whose processes the runner may have stopped; a signal in the log is its own."""

_RANK_OF_PATH: Final = (
    re.compile(r"rank[_.-]?(\d{1,7})", re.IGNORECASE),
    re.compile(r"attempt_\d+/(\d{1,7})/std(?:out|err)\.log$"),
)
_PRINTABLE_SHARE: Final = 0.9
_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@dataclass(frozen=True)
class Run:
    """What was read of one run."""

    log: ParsedLog
    files: tuple[Path, ...]
    outcome: dict[str, Any] = field(default_factory=dict)


def run_diagnose(path: Path, *, as_json: bool, console: Console) -> int:
    """Print what is wrong with a run, most serious first; returns the exit code, 0 whatever was found.

    Raises InputError for a path that is missing, empty, or no text.
    """
    run = read_run(path)
    facts = run_facts(run.log)
    findings = with_outcome(diagnose(run.log), run.outcome)
    if as_json:
        print(json.dumps(_finite(as_dict(path, run, findings, facts)), indent=2))
    else:
        _print(console, run, findings, facts)
    return 0


def with_outcome(findings: Sequence[Diagnosis], outcome: Mapping[str, Any]) -> tuple[Diagnosis, ...]:
    """The findings beside what the probe's runner decided, which saw more than the log shows.

    A probe that it ended itself was not stopped by someone else; one that it gave up on (a timeout, a launcher
    that failed) went wrong even where the log is silent.
    """
    status = outcome.get("status")
    if status in ENDED_BY_THE_RUNNER:
        findings = [f for f in findings if f.rule not in ("stopped", "incomplete")]
    if status in (None, COMPLETED) or any(f.severity is Severity.ERROR for f in findings):
        return tuple(findings)
    message = str(outcome.get("message") or status)
    if status == CANCELLED:
        return (
            *findings,
            Diagnosis(f"probe-{status}", Severity.NOTE, f"titan-tune ended this run: {message}"),
        )
    return (Diagnosis(f"probe-{status}", Severity.ERROR, message), *findings)


def as_dict(path: Path, run: Run, findings: Sequence[Diagnosis], facts: RunFacts) -> dict[str, Any]:
    """As ``diagnose --json`` prints it."""
    return {
        "schema": SCHEMA,
        "path": str(path),
        "files": [str(file) for file in run.files],
        "outcome": {key: run.outcome.get(key) for key in ("status", "message")} if run.outcome else None,
        "facts": asdict(facts),
        "findings": [finding.as_dict() for finding in findings],
    }


# --- reading -------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """Read what ``path`` holds; raises InputError where that is no log."""
    if path.is_file():
        if path.name == STDOUT and (path.parent / OUTCOME).is_file():
            return _trial(path.parent)
        return Run(parse_log(_text(path)), (path,))
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise InputError(f"{path} is neither a file nor a folder")
    if (path / OUTCOME).is_file() or (path / STDOUT).is_file():
        return _trial(path)
    if (path / "trials").is_dir():
        raise InputError(f"{path} is a study: name one of its trials, {path}/trials/<config_id>")
    files = _log_files(path)
    logs = [parse_log(text, source=_name(file, path), rank=_rank(file)) for file, text in _texts(files)]
    if not logs:
        kinds = ", ".join(f"*{suffix}" for suffix in LOG_SUFFIXES)
        raise InputError(f"{path} holds no log that says anything; looked for {kinds}")
    return Run(merge(logs), tuple(files))


def _text(path: Path) -> str:
    """The text of a log; raises InputError for one that is empty, too large, or no text."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise InputError(f"{path} has {size / 1e9:.1f} GB; cut it to its first and last lines (head, tail)")
    data = path.read_bytes()
    if not data.strip():
        raise InputError(f"{path} is empty")
    if b"\0" in data[:65536]:
        raise InputError(f"{path} is not a text file")
    text = data.decode("utf-8", errors="replace")
    sample = text[:65536]
    printable = sum(c.isprintable() or c in "\n\r\t\x1b\b" for c in sample) - sample.count("�")
    if printable < _PRINTABLE_SHARE * len(sample):
        raise InputError(f"{path} is not a text file")
    return text


def _texts(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """The files that say something: a rank's stderr is often empty."""
    for file in files:
        if file.stat().st_size:
            yield file, _text(file)


def _log_files(folder: Path) -> list[Path]:
    """Logs in ``folder`` and below it, ranks in numeric order."""
    files = [p for p in folder.rglob("*") if p.suffix in LOG_SUFFIXES and p.is_file()]
    if len(files) > MAX_FILES:
        raise InputError(
            f"{folder} holds {len(files)} logs, more than {MAX_FILES}; name the folder of one run"
        )
    return sorted(files, key=lambda p: [int(part) if part.isdigit() else part for part in _parts(p)])


def _parts(path: Path) -> list[str]:
    """Alternating text and digits, so that parts of the same index compare."""
    return re.split(r"([0-9]+)", str(path))


def _name(file: Path, folder: Path) -> str:
    return str(file.relative_to(folder))


def _rank(file: Path) -> int | None:
    match = next((m for pattern in _RANK_OF_PATH if (m := pattern.search(file.as_posix())) is not None), None)
    return int(match[1]) if match else None


def _trial(folder: Path) -> Run:
    """A titan-tune trial: its log, and what the plug-in recorded beside it."""
    outcome = _json(folder / OUTCOME)
    stdout = folder / STDOUT
    has_log = stdout.is_file() and stdout.stat().st_size > 0
    log = parse_log(_text(stdout), source=STDOUT) if has_log else ParsedLog()
    recorded = tuple(
        error for file in sorted(folder.glob("error.rank*.json")) if (error := _recorded(file)) is not None
    )
    headers = [_first_line(file) for file in sorted(folder.glob("metrics.rank*.jsonl"))]
    counts = [h["float8_linear_modules"] for h in headers if isinstance(h.get("float8_linear_modules"), int)]
    if not has_log and not outcome and not recorded:
        raise InputError(f"{folder} has an empty {STDOUT} and no {OUTCOME}")
    return Run(
        replace(
            log,
            errors=(*recorded, *log.errors),
            float8_linear_modules=max(counts) if counts else log.float8_linear_modules,
        ),
        (stdout,) if has_log else (),
        outcome,
    )


def _recorded(file: Path) -> RaisedError | None:
    """One ``error.rank*.json``."""
    record = _json(file)
    kind, message = record.get("type"), record.get("message")
    if not isinstance(kind, str) or not isinstance(message, str):
        return None
    time, rank, frames = record.get("time"), record.get("rank"), record.get("frames")
    listed = frames if isinstance(frames, list) else ()
    return RaisedError(
        type=kind.removeprefix("builtins."),
        message=message,
        frames=tuple(frame for text in listed if (frame := _frame(text)) is not None),
        rank=rank if isinstance(rank, int) else None,
        source=file.name,
        time=float(time) if isinstance(time, int | float) else None,
        phase=_PHASE_WORDS.get(str(record.get("phase")), ""),
    )


_PHASE_WORDS: Final = {
    "init": "start-up",
    "data": "reading data",
    "forward": "the forward",
    "backward": "the backward",
    "gradient_clipping": "gradient clipping",
    "optimizer": "the optimizer step",
    "compile": "compilation",
    "logging": "logging",
    "step": "the step",
}
"""The plug-in's phases, as the messages here say them."""


def _frame(text: object) -> Frame | None:
    match = re.fullmatch(r"(.*):(\d{1,9}) (.*)", str(text))
    return Frame(match[1], int(match[2]), match[3]) if match else None


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or holds something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _first_line(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as lines:
            value = json.loads(lines.readline())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- printing ------------------------------------------------------------------------------------


def _print(console: Console, run: Run, findings: Sequence[Diagnosis], facts: RunFacts) -> None:
    from rich.text import Text

    def say(*parts: tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    if run.outcome:
        say(("outcome: ", "dim"), (": ".join(outcome_words(run.outcome)), ""))
    for finding in findings:
        say(
            (finding.severity.value, _STYLES[finding.severity]),
            (f" [{finding.rule}] ", "dim"),
            (finding.message, ""),
        )
        if finding.fix:
            say(("  fix: ", "green"), (finding.fix, ""))
        if finding.evidence is not None:
            line = finding.evidence
            where = ":".join(part for part in (line.source, str(line.number) if line.number else "") if part)
            rank = "" if line.rank is None else f" rank {line.rank}"
            say((f"  {'line ' if not line.source else ''}{where}{rank}: {line.text.strip()[:160]}", "dim"))
    if all(finding.severity is Severity.NOTE for finding in findings):
        say(("nothing is wrong that this log would show", "bold green"))
    for text in fact_lines(facts, status=run.outcome.get("status")):
        say(("  " + text, ""))


def outcome_words(outcome: Mapping[str, Any]) -> list[str]:
    """Status and message, what there is of them."""
    return [str(outcome[name]) for name in ("status", "message") if outcome.get(name)]


def fact_lines(facts: RunFacts, *, status: str | None = None) -> list[str]:
    """What was measured, a line each. ``status`` is the outcome of a titan-tune trial."""
    lines = []
    if facts.last_step is not None:
        of = f" of {facts.total_steps}" if facts.total_steps is not None else ""
        lines.append(f"steps: {facts.last_step}{of}, {_end(facts, status)}")
    if facts.tokens_per_second_per_gpu is not None:
        mfu = f", mfu {facts.mfu_percent:.1f}%" if facts.mfu_percent is not None else ""
        spread = f", spread {facts.spread:.1%}" if facts.spread is not None else ""
        lines.append(
            f"throughput: {facts.tokens_per_second_per_gpu:,.0f} tokens/s per GPU "
            f"(median of {facts.measured_lines} lines after the warm-up{spread}{mfu})"
        )
    elif facts.last_step is not None:
        lines.append("throughput: too few steps to say")
    if facts.peak_reserved_gib is not None:
        lines.append(
            f"memory: {facts.peak_reserved_gib:.2f} GiB reserved at most ({facts.peak_reserved_percent:.1f}%)"
        )
    if facts.first_loss is not None:
        lines.append(f"loss: {facts.first_loss:.4f} to {facts.last_loss:.4f}")
    if facts.seconds_to_first_step is not None:
        lines.append(f"first step: {facts.seconds_to_first_step:.0f} s after torchtitan's first line")
    return lines


def _end(facts: RunFacts, status: str | None) -> str:
    """How a run that has steps ended."""
    if facts.completed or (facts.last_step == facts.total_steps and status == COMPLETED):
        return "completed"
    if status == COMPLETED:
        return "ended early: titan-tune had measured enough"
    if facts.last_step == facts.total_steps:
        return "all done, but torchtitan's last line is missing"
    return "not completed"


def _finite(value: Any) -> Any:
    """``value`` as JSON has it: floats that are not finite become their names."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
