"""Why a run failed: one cause.

The first rank that failed for a reason of its own. What other ranks say after it (lost connections, timeouts,
torchrun's summary) is the consequence, and is told only where nothing else is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from titan_tune.titan.logs import LogLine, Milestone, ParsedLog
from titan_tune.titan.signs.classify import CUDA_OOM, CUDA_OOM_SPLIT, classify, phase_of, size_bytes
from titan_tune.titan.signs.facts import RunFacts, degrees
from titan_tune.titan.signs.finding import Diagnosis, Severity
from titan_tune.titan.signs.machine_failures import COLLECTIVES
from titan_tune.titan.tracebacks import RaisedError


def failure_cause(log: ParsedLog, facts: RunFacts) -> Diagnosis | None:
    """Why the run failed; ``None`` where nothing says that it did."""
    own, timeouts, fallout = _split_errors(log)
    if own:
        # NCCL's complaints are seldom the first thing that went wrong
        first = [error for error in own if _rule(error) != "nccl-error"] or own
        return _raised(_first_error(first, log), first, log)
    for find in (_refused_options, _killed_from_outside, _crashed_worker):
        found = find(log)
        if found is not None:
            return found
    hang = _hang(log, timeouts, facts)
    if hang is not None:
        return hang
    if fallout:
        return _raised(_first_error(fallout, log), fallout, log)
    return _exited(log)


def _split_errors(log: ParsedLog) -> tuple[list[RaisedError], list[RaisedError], list[RaisedError]]:
    """(errors of a rank's own, collective timeouts, consequences); the launcher's copies only where it has all."""
    workers = [
        e for e in log.errors if not e.type.endswith(("ChildFailedError", "SignalException")) and e.type
    ]
    errors = [e for e in workers if not e.is_summary] or workers
    own, timeouts, fallout = [], [], []
    for error in errors:
        found = classify(error)
        if error.type.rpartition(".")[2] in ("KeyboardInterrupt", "SystemExit"):
            continue
        if _rule(error) == "collective-timeout":
            timeouts.append(error)
        elif found is not None and found[0].is_fallout:
            fallout.append(error)
        else:
            own.append(error)
    return own, timeouts, fallout


def _rule(error: RaisedError) -> str:
    found = classify(error)
    return "" if found is None else found[0].rule


def _first_error(errors: Sequence[RaisedError], log: ParsedLog) -> RaisedError:
    """By recorded time; else that of the rank torchrun saw fail first; else the first in the log."""
    timed = [e for e in errors if e.time is not None]
    if timed:
        return min(timed, key=lambda e: e.time or 0.0)
    root = next((worker.rank for worker in log.failed_workers if worker.is_root), None)
    return next((e for e in errors if e.rank == root and root is not None), errors[0])


def _raised(error: RaisedError, others: Sequence[RaisedError], log: ParsedLog) -> Diagnosis:
    started = any(step.line.rank == error.rank or error.rank is None for step in log.steps)
    phase = error.phase or phase_of(error.all_frames, started=started)
    evidence = _evidence(error)
    oom = CUDA_OOM.search(error.text)
    if oom is not None:
        return _cuda_oom(oom, error, phase, evidence, log)
    found = classify(error)
    if found is None:
        return Diagnosis(
            "unhandled-exception",
            Severity.ERROR,
            f"{_who(error.rank)} raised {_short(error)} in {phase}",
            _where(error),
            evidence,
            _same_ranks(error, others),
        )
    failure, groups = found
    message = failure.message.format_map(groups)
    rules_own_words = failure.rule in ("compile-failed", "graph-break", "nccl-error")
    if rules_own_words:
        message += f" in {phase}: {_short(error)}"
    return Diagnosis(
        failure.rule,
        Severity.ERROR,
        message,
        failure.fix.format_map(groups),
        evidence,
        _same_ranks(error, others),
    )


def _cuda_oom(
    match: re.Match[str], error: RaisedError, phase: str, evidence: LogLine, log: ParsedLog
) -> Diagnosis:
    """Out of GPU memory: what was asked for, what was left, and whether fragmentation is to blame."""
    split = CUDA_OOM_SPLIT.search(error.text)
    room = f"; {match['free']} of {match['total']} were free" if match["total"] else ""
    held = (
        f", PyTorch had {split['allocated']} in use and {split['reserved']} reserved but unused"
        if split
        else ""
    )
    last = max((s.step for s in log.steps if s.line.rank == error.rank or error.rank is None), default=0)
    fixes = []
    if split is not None and size_bytes(split["reserved"]) > size_bytes(match["asked"]):
        fixes.append("PYTORCH_ALLOC_CONF=expandable_segments:True makes the reserved part usable")
    if phase == "the loss":
        fixes.append('compile the loss ("loss" among compile.components): its logits are the peak')
    if log.find(r"SAC save list contains|selective activation checkpointing") and not log.first(
        Milestone.COMPILING
    ):
        fixes.append(
            'compile, or use mode = "full": eager selective checkpointing holds memory in reference cycles'
        )
    fixes.append("lower training.local_batch_size, checkpoint more, or shard over more ranks")
    fixes.append("titan-tune estimate JOB says what would fit")
    return Diagnosis(
        "cuda-out-of-memory",
        Severity.ERROR,
        f"{_who(error.rank)} ran out of GPU memory in {phase} of step {last + 1}: "
        f"it asked for {match['asked']}{room}{held}",
        "; ".join(fixes),
        evidence,
        () if error.rank is None else (error.rank,),
    )


_SIGNALS: Final = {
    -9: (
        "killed-by-system",
        "was killed by SIGKILL: most often the system ran out of memory (RAM, not the GPU's)",
        "dmesg shows an oom-kill if it was that; use fewer data workers or more memory, or see who killed it",
    ),
    -7: ("shared-memory-full", "died of SIGBUS: /dev/shm is full", "enlarge it (docker run --shm-size=16g)"),
    -11: (
        "crashed",
        "crashed (SIGSEGV)",
        "mixed versions of torch, torchao, triton or NCCL are the usual reason: titan-tune doctor shows them",
    ),
    -4: ("crashed", "crashed (SIGILL)", "the build of torch does not suit this CPU"),
    -6: ("crashed", "aborted (SIGABRT)", "the line before its end says why"),
}


def _crashed_worker(log: ParsedLog) -> Diagnosis | None:
    """A worker that a signal ended, where that is not a watchdog's abort."""
    signalled = [w for w in log.failed_workers if w.exit_code in _SIGNALS]
    worker = next((w for w in signalled if w.is_root), signalled[0] if signalled else None)
    if worker is None or (worker.exit_code == -6 and _watchdog_lines(log)):
        return None
    rule, what, fix = _SIGNALS[worker.exit_code]
    text = next((line.text for line in log.lines if line.number == worker.number), "").strip()
    evidence = LogLine(worker.number, text, worker.rank, source=worker.source)
    return Diagnosis(rule, Severity.ERROR, f"rank {worker.rank} {what}", fix, evidence, (worker.rank,))


def _watchdog_lines(log: ParsedLog) -> list[LogLine]:
    """c10d's own lines about a collective that did not end, one a rank."""
    pattern = next(f.pattern for f in COLLECTIVES if f.rule == "collective-timeout")
    lines = {
        line.rank: line for line in reversed(log.lines) if line.level == "ERROR" and pattern.search(line.text)
    }
    return sorted(lines.values(), key=lambda line: line.number)


_OPERATION: Final = re.compile(r"OpType=(\w+)")
_TIMEOUT_MS: Final = re.compile(r"Timeout\(ms\)=(\d{1,12})|waiting (\d{1,12})ms|timeout after (\d{1,12})ms")


def _hang(log: ParsedLog, timeouts: Sequence[RaisedError], facts: RunFacts) -> Diagnosis | None:
    """A collective that timed out: which operation, after how long, and who did not say so."""
    watchdog = _watchdog_lines(log)
    raised = [_evidence(error) for error in timeouts]
    lines = watchdog or raised
    if not lines:
        return None
    waiting = tuple(sorted({line.rank for line in lines if line.rank is not None}))
    operation, timeout = _OPERATION.search(lines[0].text), _TIMEOUT_MS.search(lines[0].text)
    seconds = int(next(filter(None, timeout.groups()))) / 1000 if timeout else None
    # a rank whose output is not in the log cannot be told from one that hangs
    heard = {line.rank for line in log.lines if line.rank is not None}
    missing = sorted(heard - set(waiting)) if waiting else []
    what = f"a collective{f' ({operation[1]})' if operation else ''} timed out"
    when = f" after {seconds:g} s" if seconds is not None else ""
    who = f"; ranks that did not report it: {_list(missing)} (look there first)" if missing else ""
    where = (
        f" at step {facts.last_step + 1}" if facts.last_step is not None else " before the first step ended"
    )
    return Diagnosis(
        "collective-timeout",
        Severity.ERROR,
        f"{what}{when}{where}{who}",
        _hang_fix(log, facts),
        lines[0],
        waiting,
    )


def _hang_fix(log: ParsedLog, facts: RunFacts) -> str:
    if facts.last_step is None:
        return (
            "the first step includes compilation: raise comm.init_timeout_seconds (default 300) if it was still at "
            "work; else see what the missing rank was doing"
        )
    fix = (
        "raise comm.train_timeout_seconds (default 100) if a rank was only slow; the flight recorder's files in "
        "comm.save_traces_folder name the collective"
    )
    if degrees(log).get("ep", 1) > 1 and log.first(Milestone.COMPILING) is not None:
        fix += "; expert parallelism with a compiled model has hung before: try compile.enable = false"
    return fix


_OUTSIDE: Final = (
    (
        "slurm-time-limit",
        re.compile(r"DUE TO TIME LIMIT"),
        "Slurm ended the job at its time limit",
        "ask for more time (--time), or train fewer steps",
    ),
    (
        "slurm-preempted",
        re.compile(r"DUE TO PREEMPTION"),
        "Slurm preempted the job",
        "submit it again, or use a partition that is not preempted",
    ),
    (
        "slurm-node-failure",
        re.compile(r"DUE TO NODE FAILURE|Node failure on"),
        "a node failed",
        "submit it again; this says nothing about the configuration",
    ),
    (
        "host-out-of-memory",
        re.compile(r"oom[-_]kill event|Out Of Memory|Exceeded job memory limit|oom_kill"),
        "the job's memory limit was reached (RAM, not the GPU's)",
        "ask for more (--mem), or use fewer data workers",
    ),
    (
        "stopped",
        re.compile(
            r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT|got signal: (?:15|2|1)\b|^KeyboardInterrupt"
        ),
        "the run was stopped from outside",
        "whoever sent the signal knows why (scancel, a time limit, Ctrl-C)",
    ),
)


def _killed_from_outside(log: ParsedLog) -> Diagnosis | None:
    """Slurm's lines, and signals that the launcher was sent."""
    for rule, pattern, message, fix in _OUTSIDE:
        line = log.find(pattern)
        if line is not None:
            return Diagnosis(rule, Severity.ERROR, message, fix, line)
    return None


def _refused_options(log: ParsedLog) -> Diagnosis | None:
    """tyro's box: it prints no traceback."""
    line = log.find(r"Unrecognized options: |(?:Required|Invalid) (?:options|value|choice)|Parsing error")
    if line is None or log.first(Milestone.STARTING) is not None:
        return None
    text = line.text.strip(" │╭╮─|")
    return Diagnosis(
        "unknown-option",
        Severity.ERROR,
        f"torchtitan refused its command line: {text}",
        "compare with python -m torchtitan.train --help; keys of the file are written --section.key",
        line,
    )


def _exited(log: ParsedLog) -> Diagnosis | None:
    """torchrun says that a worker failed, and nothing says why."""
    worker = next((w for w in log.failed_workers if w.is_root), next(iter(log.failed_workers), None))
    if worker is None:
        return None
    evidence = LogLine(worker.number, f"exitcode {worker.exit_code}", worker.rank, source=worker.source)
    return Diagnosis(
        "worker-exited",
        Severity.ERROR,
        f"rank {worker.rank} ended with code {worker.exit_code}, and this log does not say why",
        "look in that rank's own log (torchrun --tee 3 --log-dir DIR writes one a rank)",
        evidence,
        (worker.rank,),
    )


def _who(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _evidence(error: RaisedError) -> LogLine:
    """The line that names the exception."""
    text = f"{error.type}: {error.message}" if error.message else error.type
    return LogLine(error.number, text.split("\n")[0], error.rank, source=error.source)


def _short(error: RaisedError) -> str:
    message = " ".join(error.message.split())
    name = error.type.rpartition(".")[2]
    return f"{name}: {message[:200]}" if message else name


def _where(error: RaisedError) -> str:
    """The innermost frame of torchtitan, for an exception that no rule knows."""
    frame = next((f for f in reversed(error.all_frames) if "torchtitan/" in f.file), None)
    if frame is None:
        return "the traceback is in the log"
    place = frame.file[frame.file.rfind("torchtitan/") :]
    return f"raised below {place}:{frame.line} ({frame.function})"


def _same_ranks(error: RaisedError, others: Sequence[RaisedError]) -> tuple[int, ...]:
    """Ranks that raised the same."""
    return tuple(sorted({e.rank for e in others if e.type == error.type and e.rank is not None}))


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, … ({len(ranks)} in all)"
