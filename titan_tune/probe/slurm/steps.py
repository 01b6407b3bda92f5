"""Probes as steps of the allocation that the search runs in (``salloc``, or a batch script of its own).

Each step gets its nodes by name, and its share of them by number: nothing waits for resources in Slurm, because what
is free is known here.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe import files
from titan_tune.probe.launch import environment_record
from titan_tune.probe.record import write_whole
from titan_tune.probe.slurm.batch import torchrun_arguments
from titan_tune.probe.slurm.commands import Commands
from titan_tune.probe.slurm.environment import step_environment, unmarked
from titan_tune.probe.slurm.jobs import JobEnd, JobRow, Listing, SubmissionError, UnreachableError
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.script import step_script
from titan_tune.probe.slurm.settings import SlurmSettings

SCRIPT: Final = "step.sh"
KILL_SECONDS: Final = 15.0
"""How long srun may take to end after its step was cancelled."""
FIRST_PORT: Final = 20000
PORTS: Final = 10000


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes of this job, and what each of them gives."""

    job_id: str
    nodes: tuple[str, ...]
    cpus_per_node: int
    gpus_per_node: int | None
    """``None`` where Slurm does not say: GPUs are then not its to share out."""
    memory_per_node_mb: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], nodes: tuple[str, ...]) -> Allocation:
        """From Slurm's variables in a job; the smallest node counts. ``nodes`` are SLURM_JOB_NODELIST's names."""
        cpus = [
            int(count)
            for count in re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        ]
        given = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        memory = environ.get("SLURM_MEM_PER_NODE", "")
        return cls(
            job_id=environ["SLURM_JOB_ID"],
            nodes=nodes,
            cpus_per_node=min(cpus, default=1),
            gpus_per_node=int(given) if given.isdigit() else None,
            memory_per_node_mb=int(memory) if memory.isdigit() and int(memory) > 0 else None,
        )

    def shares(self, device: str, ranks_per_node: int) -> int:
        """How many probes of so many ranks a node has room for at once."""
        if device != "cuda" or self.gpus_per_node is None:
            return 1
        return self.gpus_per_node // ranks_per_node

    def slots(self, device: str, *, num_nodes: int, ranks_per_node: int) -> int:
        """How many probes have room in the whole allocation at once."""
        return len(self.nodes) // num_nodes * self.shares(device, ranks_per_node)


@dataclass(slots=True)
class _Step:
    process: subprocess.Popen[bytes]
    nodes: tuple[str, ...]
    started: float
    ended: float | None = None
    cancelled: float | None = None
    """Monotonic time of the first request to end it."""

    def release(self) -> None:
        """Let go of its standard input: it ends."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()


@dataclass(slots=True)
class AllocationSteps:
    """``Jobs`` of one allocation. A job's id is its step's name."""

    allocation: Allocation
    settings: SlurmSettings
    commands: Commands
    ledger: NodeLedger
    cache_directory: str
    workdir: Path
    _steps: dict[str, _Step] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _launches: int = 0

    def submit(self, spec: ProbeSpec, name: str, avoid: tuple[str, ...], lane: int) -> str:
        """Write ``step.sh`` into the trial folder and run it. Raises SubmissionError where nothing is free."""
        shares = self.allocation.shares(spec.device, spec.nproc_per_node)
        with self._lock:
            nodes = self._place(spec.num_nodes, shares, avoid)
            port = FIRST_PORT + (int(self.allocation.job_id) * 31 + self._launches) % PORTS
            self._launches += 1
            environment = step_environment(spec, uuid.uuid4().hex, dict(os.environ))
            path = spec.directory / SCRIPT
            write_whole(path, self._script(spec, name, lane, nodes, port, shares, environment))
            by_hand = self._script(spec, name, lane, nodes, port, shares, unmarked(environment), tied=False)
            write_whole(spec.directory / files.COMMAND, f"bash -c {shlex.quote(by_hand)}\n")
            files.write_json(spec.directory / files.ENVIRONMENT, environment_record(spec, environment))
            with (spec.directory / files.LOG).open("wb") as log:
                process = subprocess.Popen(
                    ["bash", str(path)],
                    stdin=subprocess.PIPE,  # the step ends with it
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is the search's to handle
                )
            self._steps[name] = _Step(process, nodes, time.time())
        return name

    def locate(self, name: str) -> str | None:
        """A step is known as soon as it is started."""
        return name if name in self._steps else None

    def listing(self, job_ids: tuple[str, ...]) -> Listing:
        """From the sruns, which are children of this process."""
        return Listing(
            reachable=True, jobs={name: self._row(name) for name in job_ids if name in self._steps}
        )

    def end_of(self, job_id: str, name: str) -> JobEnd:
        """From srun's exit and the nodes' states."""
        step = self._steps[job_id]
        code = step.process.poll()
        if code is None:
            return JobEnd(job_id)
        return JobEnd(
            job_id,
            state="COMPLETED" if code == 0 else "FAILED",
            exit_code=abs(code),
            nodes=step.nodes,
            bad_nodes=self.commands.bad_nodes(step.nodes),
            started=step.started,
            ended=step.ended or time.time(),
        )

    def cancel(self, job_id: str, name: str) -> bool:
        """Cancel the step by its id, or srun where there is no step yet; in the end SIGKILL for a srun that stays."""
        step = self._steps[job_id]
        try:
            found = self.commands.steps_of(self.allocation.job_id).get(job_id)
        except UnreachableError:
            found = None  # srun reaches its nodes without the controller
        if found is not None:
            self.commands.cancel_step(found)
        else:
            step.release()
        step.cancelled = step.cancelled or time.monotonic()
        if time.monotonic() - step.cancelled > KILL_SECONDS and step.process.poll() is None:
            os.killpg(step.process.pid, signal.SIGKILL)
        return True

    def _place(self, count: int, shares: int, avoid: Sequence[str]) -> tuple[str, ...]:
        """``count`` nodes with a free share, the emptiest first, bad ones last."""
        used = dict.fromkeys(self.allocation.nodes, 0)
        for step in self._steps.values():
            if step.process.poll() is None:
                for node in step.nodes:
                    used[node] += 1
        shunned = {*self.ledger.bad, *avoid}
        free = [node for node in self.allocation.nodes if used[node] < shares]
        free.sort(key=lambda node: (node in shunned, used[node]))
        if len(free) < count:
            raise SubmissionError(f"{count} free nodes are needed, {len(free)} are there", limited=True)
        return tuple(free[:count])

    def _script(
        self,
        spec: ProbeSpec,
        name: str,
        lane: int,
        nodes: tuple[str, ...],
        port: int,
        shares: int,
        environment: Mapping[str, str],
        *,
        tied: bool = True,
    ) -> str:
        return step_script(
            name=name,
            nodes=nodes,
            port=port,
            nproc_per_node=spec.nproc_per_node,
            step_options=self._step_options(spec, shares),
            settings=self.settings,
            command=torchrun_arguments(spec),
            environment=environment,
            workdir=self.workdir,
            cache_directory=f"{self.cache_directory}-{lane}",
            tied=tied,
        )

    def _step_options(self, spec: ProbeSpec, shares: int) -> list[str]:
        """A whole node is taken whatever else runs there, such as the search itself; a part of one exactly."""
        allocation = self.allocation
        options = [f"--cpus-per-task={max(1, allocation.cpus_per_node // shares)}"]
        options += ["--overlap"] if shares == 1 else ["--exact"]
        if spec.device == "cuda" and allocation.gpus_per_node is not None:
            options.append(f"--gpus-per-node={spec.nproc_per_node}")
        if allocation.memory_per_node_mb is not None:
            options.append(f"--mem={allocation.memory_per_node_mb // shares}M")
        return options

    def _row(self, name: str) -> JobRow:
        step = self._steps[name]
        code = step.process.poll()
        if code is None:
            state = "RUNNING"
        else:
            state = "COMPLETED" if code == 0 else "FAILED"
            step.ended = step.ended or time.time()
            step.release()
        return JobRow(name, state, step.started, 0, 0, ",".join(step.nodes), "", name)
