"""``titan-tune estimate --method trace``: what is traced, how long it may take, how long it has taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from titan_tune.cli.console import stderr_console
from titan_tune.units import format_duration

if TYPE_CHECKING:
    from titan_tune.domain.candidate import Value
    from titan_tune.domain.settings import Settings
    from titan_tune.estimate.traced import Traced
    from titan_tune.titan.job import Job

START_SECONDS: Final = (5.0, 30.0)
"""Imports and the model's construction, on an idle machine and on a busy one."""
BLOCK_SECONDS: Final = (0.3, 1.5)
"""Two steps of one block and one microbatch, likewise. On a two-core machine with six processes llama3 8B took 57 s
(32 blocks) and both pipeline ranks of 70B with four microbatches 462 s (40 blocks each): 1.4 s."""


def tracer(job: Job, settings: Settings, values: Mapping[str, Value]) -> Callable[[], Traced]:
    """Traces the job when called, and says on stderr what it does: it takes a while."""

    def trace() -> Traced:
        from titan_tune.estimate.traced import traced_memory

        console = stderr_console()
        low, high = map(format_duration, trace_seconds(settings))
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting", total=None)

            def on_rank(rank: int, ranks: int) -> None:
                where = f"pipeline rank {rank} of {ranks}" if ranks > 1 else "one rank"
                console.print(f"tracing two steps of {where} on the CPU ({low} to {high})", style="dim")
                progress.update(task, description=f"tracing {where}")

            return traced_memory(settings, values, job.model_args, on_rank=on_rank)

    return trace


def trace_seconds(settings: Settings) -> tuple[float, float]:
    """How long the trace of one rank takes, on an idle machine and on a busy one."""
    pp = settings.dims.pp
    microbatches = settings.gradient_accumulation_steps
    if pp > 1:
        microbatches *= max(1, settings.local_batch_size // settings.pipeline.microbatch_size)
    blocks = settings.model.n_layers / pp * microbatches
    fastest, slowest = (
        start + blocks * each for start, each in zip(START_SECONDS, BLOCK_SECONDS, strict=True)
    )
    return fastest, slowest
