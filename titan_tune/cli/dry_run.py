"""``titan-tune estimate --method dry-run``: one rank, or one of each pipeline rank, on this machine's GPUs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from titan_tune.domain.candidate import config_id_of, identity_of
from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.errors import ProbesFailedError
from titan_tune.machine import local_cluster
from titan_tune.probe.dry_run import DryRunner, DryRunProbe
from titan_tune.probe.dry_run_answer import answer_from, rejected
from titan_tune.probe.dry_run_model import ALL
from titan_tune.probe.toml import probe_values
from titan_tune.titan.job import render
from titan_tune.titan.settings import settings_from

if TYPE_CHECKING:
    from rich.console import Console

    from titan_tune.domain.cluster import ClusterSpec
    from titan_tune.domain.probe import ProbeOutcome
    from titan_tune.domain.settings import Settings
    from titan_tune.estimate.answer import Answer
    from titan_tune.titan.job import Job

POLL_SECONDS: Final = 0.2
SETTINGS: Final = ProbeSettings(retries=0)


def dry_run_answer(job: Job, cluster: ClusterSpec, console: Console) -> Answer:
    """Run the job's ranks, and say on ``console`` what is being done.

    Raises:
        ProbesFailedError: the dry run could not run here; its folder is kept, and named.
    """
    values, machine = job.resolved(), local_cluster()
    settings = settings_from(values, job.model, cluster)
    refused = rejected(settings, values)
    if refused is not None:
        return refused
    directory = Path(tempfile.mkdtemp(prefix="titan-tune-dry-run-"))
    spec = _spec(job, settings, directory, device="cpu" if machine.gpu.is_cpu else "cuda")
    outcome = _run(spec, cluster, machine, console)
    try:
        found = answer_from(
            settings, values, machine, outcome, tokens_per_step_per_rank=spec.tokens_per_step_per_rank
        )
    except ProbesFailedError as error:
        raise ProbesFailedError(f"{error} (see stdout.log in {directory})") from None
    shutil.rmtree(directory)
    return found


def _spec(job: Job, settings: Settings, directory: Path, *, device: str) -> ProbeSpec:
    cluster = settings.cluster
    overrides = probe_values(job.resolved(), SETTINGS, directory, device)
    return ProbeSpec(
        config_id=config_id_of(identity_of(job.resolved())),
        directory=directory,
        toml=render(job, overrides),
        nproc_per_node=cluster.gpus_per_node,
        num_nodes=cluster.num_nodes,
        device=device,
        settings=SETTINGS,
        cache_directory=_compile_cache(),
        tokens_per_step_per_rank=settings.global_batch_size * settings.seq_len / cluster.world_size,
    )


def _compile_cache() -> Path:
    """Compiled code is kept for the next time: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "titan-tune" / "compile"


def _run(spec: ProbeSpec, cluster: ClusterSpec, machine: ClusterSpec, console: Console) -> ProbeOutcome:
    with DryRunner(cluster, machine, ranks=ALL) as runner:
        probe = runner.start(spec)
        said: set[int] = set()
        while (outcome := probe.poll()) is None:
            _say(probe, said, machine, console)
            time.sleep(POLL_SECONDS)
        return outcome


def _say(probe: DryRunProbe, said: set[int], machine: ClusterSpec, console: Console) -> None:
    for rank in probe.running_ranks():
        if rank not in said:
            said.add(rank)
            console.print(
                f"running rank {rank} of {probe.spec.world_size} alone on {machine.gpu.name} (20 s to 2 min)",
                style="dim",
            )
