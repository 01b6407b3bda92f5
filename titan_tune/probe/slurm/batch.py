"""Probes as batch jobs."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe import files
from titan_tune.probe.launch import environment_record, training_arguments
from titan_tune.probe.record import write_whole
from titan_tune.probe.slurm.commands import Commands
from titan_tune.probe.slurm.environment import script_environment, submission_environment, unmarked
from titan_tune.probe.slurm.jobs import JobEnd, Listing
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.script import sbatch_script
from titan_tune.probe.slurm.settings import SlurmSettings
from titan_tune.titan.plugin import environment as plugin

SCRIPT: Final = "job.sh"
TIME_MARGIN_SECONDS: Final = 180.0
"""What a job's time limit allows beyond the probe's own deadline: that one should end it, and say why."""


def torchrun_arguments(spec: ProbeSpec) -> list[str]:
    """torchrun's own options and what it runs, after the options by which nodes find each other."""
    return [
        "--role", "rank", "--tee", "3", "--log-dir", str(spec.directory / files.LAUNCHER_LOGS),
        "-m", "torchtitan.train", *training_arguments(spec),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchJobs:
    """``Jobs`` of a cluster's queue."""

    settings: SlurmSettings
    commands: Commands
    ledger: NodeLedger
    cache_directory: str
    environ: Mapping[str, str]
    """The caller's environment."""
    workdir: Path
    """Where relative paths of a job file begin: the search's own folder."""

    def submit(self, spec: ProbeSpec, name: str, avoid: tuple[str, ...], lane: int) -> str:
        """Write ``job.sh`` into the trial folder and submit it."""
        environment = script_environment(spec, uuid.uuid4().hex, self.environ)
        exclude = self._excluded(spec, avoid)
        script = self._script(spec, name, lane, environment, exclude)
        path = spec.directory / SCRIPT
        write_whole(path, script)
        by_hand = self._script(spec, name, lane, unmarked(environment), ())
        write_whole(spec.directory / files.COMMAND, here_document(by_hand))
        files.write_json(spec.directory / files.ENVIRONMENT, environment_record(spec, environment))
        return self.commands.submit(path, submission_environment(self.environ, self.settings))

    def locate(self, name: str) -> str | None:
        """By its name, which is unique."""
        return self.commands.job_named(name)

    def listing(self, job_ids: tuple[str, ...]) -> Listing:
        """One ``squeue``."""
        return self.commands.listing(job_ids)

    def end_of(self, job_id: str, name: str) -> JobEnd:
        """See ``Commands.end_of``."""
        return self.commands.end_of(job_id, name)

    def cancel(self, job_id: str, name: str) -> bool:
        """One ``scancel``."""
        return self.commands.cancel(job_id, name)

    def _excluded(self, spec: ProbeSpec, avoid: tuple[str, ...]) -> tuple[str, ...]:
        if not avoid and not self.ledger.bad:
            return ()
        available = self.commands.nodes_of_partition(self.settings.partition)
        return self.ledger.excluded(avoid, available=available, needed=spec.num_nodes)

    def _script(
        self,
        spec: ProbeSpec,
        name: str,
        lane: int,
        environment: Mapping[str, str],
        exclude: tuple[str, ...],
    ) -> str:
        by_hand = plugin.METRICS_DIR not in environment
        seconds = spec.settings.timeout_seconds + TIME_MARGIN_SECONDS
        return sbatch_script(
            job_name=name,
            nodes=spec.num_nodes,
            gpus_per_node=spec.nproc_per_node if spec.device == "cuda" else 0,
            settings=self.settings,
            command=torchrun_arguments(spec),
            environment=environment,
            stdout=spec.directory / ("by-hand.log" if by_hand else files.LOG),
            workdir=self.workdir,
            time_minutes=self.settings.time_minutes or math.ceil(seconds / 60),
            nproc_per_node=spec.nproc_per_node,
            exclude=exclude,
            cache_directory=f"{self.cache_directory}-{lane}",
            private=True,
        )


def here_document(script: str) -> str:
    """One shell command that submits the script, whatever the script contains."""
    end = f"END_{uuid.uuid5(uuid.NAMESPACE_OID, script).hex}"
    return f"sbatch <<'{end}'\n{script}{end}\n"
