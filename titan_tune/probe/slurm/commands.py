"""Slurm's commands and their text output, which is the same from one version to the next; JSON is not.

Every call blocks and has a time limit. Three answers are told apart, because a tuner that confuses them blames the
wrong thing: a state, "no such job", and "the controller does not answer".
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from titan_tune.probe.slurm.jobs import TERMINAL, JobEnd, JobRow, Listing, SubmissionError, UnreachableError

COMMAND_SECONDS: Final = 60.0
"""A controller that is down costs squeue 2 MessageTimeouts, 20 s by default, before it says so."""

_UNREACHABLE: Final = re.compile(
    r"Unable to contact slurm controller|Socket timed out|[Cc]onnection (refused|reset|timed out|failure)"
    r"|Zero Bytes were transmitted|Transport endpoint is not connected|standby mode|not responding"
    r"|authentication (credential|error)|[Mm]unge|Unable to establish (controller|configuration)"
)
_NO_SUCH_JOB: Final = re.compile(r"Invalid job id")
_NO_ACCOUNTING: Final = re.compile(r"accounting storage is disabled|accounting_storage/none", re.IGNORECASE)
_LIMITED: Final = re.compile(r"submit limit|MaxSubmit|temporarily unable")
_FIELD: Final = re.compile(
    r"(?:^|\s)(?P<name>JobState|Reason|ExitCode|NodeList|BatchHost|StartTime|EndTime)=(?P<value>\S*)"
)
_SQUEUE_FORMAT: Final = "%i|%T|%S|%C|%D|%N|%r|%j"


@dataclass
class Commands:
    """The commands, in one environment. Safe to use from several threads."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    seconds: float = COMMAND_SECONDS
    _accounting: bool | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, script: Path, environ: Mapping[str, str]) -> str:
        """``sbatch``, which passes on ``environ`` and no other variable; the new job's id.

        Raises:
            SubmissionError: Slurm said no.
            UnreachableError: no answer; the job may exist all the same.
        """
        command = ["sbatch", "--parsable", "--no-requeue", "--export=ALL", str(script)]
        done = self._run(command, environ=environ)
        if done.returncode == 0:
            return done.stdout.strip().partition(";")[0]
        said = _last_line(done.stderr)
        if _UNREACHABLE.search(done.stderr):
            raise UnreachableError(said)
        raise SubmissionError(said, limited=bool(_LIMITED.search(done.stderr)))

    def listing(self, job_ids: Iterable[str]) -> Listing:
        """The jobs that the controller knows, one call for all; ended ones as long as it remembers them."""
        return self._squeue(["-j", ",".join(job_ids)])

    def job_named(self, name: str) -> str | None:
        """The newest job of this name, live or ended; ``None`` where Slurm knows none.

        Raises UnreachableError.
        """
        found = self._squeue(["-n", name])
        if not found.reachable:
            raise UnreachableError(found.message)
        ids = [*found.jobs]
        if not ids and self.has_accounting():
            rows = self._sacct("--name", name, "--starttime=now-30days", "-X", "-o", "JobID")
            ids = [row[0] for row in rows]
        return max(ids, key=int, default=None)

    def end_of(self, job_id: str, name: str) -> JobEnd:
        """How a job ended, from the controller, the accounting where there is one, and the nodes' states.

        ``state`` is empty where neither knows an end of a job of this id and name: a controller that has lost its
        state gives the same ids again.
        """
        shown = self._show(job_id, name)
        accounting = self.has_accounting()
        fields = "JobID,State,ExitCode,NodeList,Start,End,JobName"
        rows = self._sacct("-j", job_id, "-o", fields) if accounting else []
        whole = next((row for row in rows if row[0] == job_id and row[6] == name), None)
        state = shown.get("JobState", "")
        cancelled_by, accounted = "", ""
        if whole is not None:
            accounted, _, who = whole[1].partition(" by ")
            cancelled_by = who
            state = state if state in TERMINAL else accounted if accounted in TERMINAL else ""
        if state not in TERMINAL:
            return JobEnd(job_id)
        code, _, signal = (shown.get("ExitCode") or (whole[2] if whole else "")).partition(":")
        nodes = self.node_names(shown.get("NodeList") or (whole[3] if whole else ""))
        return JobEnd(
            job_id,
            state=state,
            reason=shown.get("Reason", ""),
            exit_code=int(code) if code.isdigit() else None,
            exit_signal=int(signal) if signal.isdigit() else 0,
            nodes=nodes,
            batch_host=shown.get("BatchHost", ""),
            bad_nodes=self.bad_nodes(nodes),
            step_states=tuple(row[1].partition(" ")[0] for row in rows if row[0] != job_id),
            cancelled_by=cancelled_by,
            accounted=accounted == state or not accounting,
            started=_time(shown.get("StartTime") or (whole[4] if whole else "")),
            ended=_time(shown.get("EndTime") or (whole[5] if whole else "")),
        )

    def cancel(self, job_id: str, name: str) -> bool:
        """``scancel`` of a job of this id and name; whether the controller was reached. An unknown job is no error."""
        return self._reached(["scancel", f"--name={name}", job_id])

    def cancel_step(self, step_id: str) -> bool:
        """``scancel`` of one step; whether the controller was reached."""
        return self._reached(["scancel", step_id])

    def steps_of(self, job_id: str) -> dict[str, str]:
        """Step ids of a job's running steps by step name. Raises UnreachableError."""
        done = self._run(["squeue", "-h", "-s", "-j", job_id, "-o", "%i|%j"])
        if done.returncode and not _NO_SUCH_JOB.search(done.stderr):
            raise UnreachableError(_last_line(done.stderr))
        lines = (line.partition("|") for line in done.stdout.splitlines())
        return {name: step for step, _, name in lines}

    def node_names(self, node_list: str) -> tuple[str, ...]:
        """``node[1-3]`` as names; needs no controller."""
        if not node_list or node_list.startswith(("(", "None")):
            return ()
        if "[" not in node_list:
            return tuple(node_list.split(","))
        return tuple(self._run(["scontrol", "show", "hostnames", node_list]).stdout.split())

    def nodes_of_partition(self, partition: str | None) -> tuple[str, ...]:
        """Nodes of a partition (by default all) that are not down; empty where the controller does not answer."""
        chosen = ["-p", partition] if partition else []
        done = self._run(["sinfo", "-h", "-N", "-r", *chosen, "-o", "%N"])
        return tuple(dict.fromkeys(done.stdout.split()))

    def has_accounting(self) -> bool:
        """Whether ``sacct`` answers here; asked once."""
        with self._lock:
            if self._accounting is None:
                done = self._run(["sacct", "-n", "-P", "-X", "-j", "1", "-o", "JobID"])
                self._accounting = done.returncode == 0
            return self._accounting

    def _reached(self, command: Sequence[str]) -> bool:
        done = self._run(command)
        return done.returncode == 0 or not _UNREACHABLE.search(done.stderr)

    def _squeue(self, chosen: Sequence[str]) -> Listing:
        done = self._run(["squeue", "-h", "-t", "all", *chosen, "-o", _SQUEUE_FORMAT])
        if done.returncode and not _NO_SUCH_JOB.search(done.stderr):
            return Listing(reachable=False, message=_last_line(done.stderr))
        rows = (JobRow.parse(line) for line in done.stdout.splitlines())
        return Listing(reachable=True, jobs={row.job_id: row for row in rows})

    def _show(self, job_id: str, name: str) -> dict[str, str]:
        """The fields of ``scontrol show job``; none where the job has another name."""
        done = self._run(["scontrol", "show", "job", "-o", job_id])
        _, found, after = done.stdout.partition(f" JobName={name} UserId=")
        return {match["name"]: match["value"] for match in _FIELD.finditer(after)} if found else {}

    def bad_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """Of ``nodes`` those that are down, failing or drained, with Slurm's reason."""
        if not nodes:
            return {}
        done = self._run(["sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N|%T|%E"])
        rows = (line.split("|", 2) for line in done.stdout.splitlines())
        # an asterisk marks a node that does not answer
        bad = re.compile(r"down|fail|drain|unk|inval|\*$")
        return {row[0]: f"{row[1]}: {row[2]}" for row in rows if len(row) == 3 and bad.search(row[1])}

    def _sacct(self, *arguments: str) -> list[list[str]]:
        done = self._run(["sacct", "-n", "-P", *arguments])
        return [line.split("|") for line in done.stdout.splitlines()]

    def _run(
        self, command: Sequence[str], *, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Out of reach of the terminal's Ctrl-C, which must not cut a submission in half."""
        try:
            return subprocess.run(
                command,
                env={**self.environ, "SLURM_TIME_FORMAT": "%s"} if environ is None else environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.seconds,
                start_new_session=True,
                umask=0o077,  # Slurm creates a job's log with the submitter's
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: Socket timed out")


def _time(text: str) -> float | None:
    """``SLURM_TIME_FORMAT=%s``."""
    return float(text) if text.isdigit() else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: error: ", "", lines[-1]) if lines else "no message"
