"""``titan-tune estimate --method dry-run``: one rank, or one of each pipeline rank, on this machine's GPUs.

On its processor, where it has none: that shows whether the job runs, and takes far longer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from titan_tune.cli import interrupt_on_terminate
from titan_tune.domain.candidate import config_id_of, identity_of
from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.errors import InputError, ProbesFailedError
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.machine import local_cluster
from titan_tune.probe.dry_run import CPU_STEPS, DryRunner, DryRunProbe
from titan_tune.probe.dry_run_answer import answer_from, rejected
from titan_tune.probe.dry_run_model import ALL
from titan_tune.probe.toml import probe_values
from titan_tune.titan.job import render
from titan_tune.titan.settings import settings_from
from titan_tune.units import GIB, format_duration, format_gib

if TYPE_CHECKING:
    from rich.console import Console

    from titan_tune.domain.cluster import ClusterSpec
    from titan_tune.domain.probe import ProbeOutcome
    from titan_tune.domain.settings import Settings
    from titan_tune.estimate.answer import Answer
    from titan_tune.titan.job import Job

POLL_SECONDS: Final = 0.2
SETTINGS: Final = ProbeSettings(retries=0)
ON_A_GPU: Final = "20 s to 2 min"
START_SECONDS: Final = 20.0
"""Imports and the model's construction, on a processor with nothing else to do."""
THREAD_TFLOPS: Final = 0.1
"""What one thread of a processor puts in place of a GPU's nominal TFLOP/s. Five llama3 jobs of 0.2 to 1.3 billion
parameters came to 0.09 to 0.19 on a busy two-core x86 machine."""
PROCESS_BYTES: Final = 0.75 * GIB
"""What torch and torchtitan take beside the model: the least of the same five jobs, 0.76 GiB."""


def dry_run_answer(job: Job, cluster: ClusterSpec, console: Console) -> Answer:
    """Run the job's ranks, and say on ``console`` what is being done.

    Raises:
        InputError: this machine has no GPU, and its processor too little memory or speed for the job.
        ProbesFailedError: the dry run could not run here; its folder is kept, and named.
    """
    values, machine = job.resolved(), local_cluster()
    settings = settings_from(values, job.model, cluster)
    refused = rejected(settings, values)
    if refused is not None:
        return refused
    duration = on_a_processor(settings, machine) if machine.gpu.is_cpu else ON_A_GPU
    interrupt_on_terminate()
    directory = Path(tempfile.mkdtemp(prefix="titan-tune-dry-run-"))
    spec = _spec(job, settings, directory, device="cpu" if machine.gpu.is_cpu else "cuda")
    keep = False
    try:
        outcome = _run(spec, cluster, machine, console, duration)
        return answer_from(
            settings, values, machine, outcome, tokens_per_step_per_rank=spec.tokens_per_step_per_rank
        )
    except ProbesFailedError as error:
        keep = True
        raise ProbesFailedError(f"{error} (see stdout.log in {directory})") from None
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def on_a_processor(settings: Settings, machine: ClusterSpec) -> str:
    """How long a rank will take on this machine's processor, and how much memory.

    Raises:
        InputError: clearly more memory than is free, or more time than a dry run has.
    """
    try:
        memory, time_on_gpu = estimate_memory(settings), estimate_step_time(settings).components
    except NotCoveredError:
        return "on a processor, many minutes or hours; it shows whether the job runs, no speed and no memory"
    need = memory.active_bytes + PROCESS_BYTES
    free = machine.gpu.memory_gib * machine.gpus_per_node * GIB
    instead = "use a machine with a GPU, or --method trace"
    if need > free:
        raise InputError(
            f"--method dry-run: without a GPU a rank runs on the processor and needs {format_gib(need)} of memory or"
            f" more, of which {format_gib(free)} is free: {instead}"
        )
    products = time_on_gpu["matmul"] + time_on_gpu["attention"]
    seconds = START_SECONDS + CPU_STEPS * products * settings.cluster.gpu.bf16_tflops / THREAD_TFLOPS
    if seconds / 2 > SETTINGS.startup_seconds:
        raise InputError(
            f"--method dry-run: without a GPU a rank runs on the processor and takes {format_duration(seconds / 2)} or"
            f" more, and a dry run has {format_duration(SETTINGS.startup_seconds)}: {instead}"
        )
    return (
        f"on a processor, {format_duration(seconds / 2)} to {format_duration(2 * seconds)} and {format_gib(need)} of"
        " memory or more; it shows whether the job runs, no speed and no memory"
    )


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


def _run(
    spec: ProbeSpec, cluster: ClusterSpec, machine: ClusterSpec, console: Console, duration: str
) -> ProbeOutcome:
    with DryRunner(cluster, machine, ranks=ALL) as runner, console.status("starting") as status:
        probe = runner.start(spec)
        said: set[int] = set()
        while (outcome := probe.poll()) is None:
            _say(probe, said, machine, console, duration)
            progress = probe.progress()
            status.update(
                f"{progress.phase} {progress.step}/{progress.steps}, {format_duration(progress.seconds)}"
            )
            time.sleep(POLL_SECONDS)
        return outcome


def _say(probe: DryRunProbe, said: set[int], machine: ClusterSpec, console: Console, duration: str) -> None:
    for rank in probe.running_ranks():
        if rank not in said:
            said.add(rank)
            console.print(
                f"running rank {rank} of {probe.spec.world_size} alone on {machine.gpu.name} ({duration})",
                style="dim",
                highlight=False,
                soft_wrap=True,
            )
