"""Prints how many candidates a second of CPU time the formula judges (one core)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from h200_rows import rows

from titan_tune.domain.settings import ParallelDims, Pipeline, Settings
from titan_tune.estimate import estimate_memory, estimate_step_time

SECONDS = 2.0


def rate(function: Callable[[Settings], object], jobs: Sequence[Settings]) -> float:
    """Calls a second, over and over the same jobs for ``SECONDS`` of CPU time."""
    for job in jobs:
        function(job)
    calls, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < SECONDS:
        for job in jobs:
            function(job)
        calls += len(jobs)
    return calls / elapsed


def main() -> None:
    measured = [row.settings for row in rows()]
    flat = [job for job in measured if job.dims.pp == 1]
    model = next(job for job in measured if job.model.flavor == "8B")

    def pipelines(pp: int, schedule: str) -> list[Settings]:
        return [
            replace(
                model,
                dims=ParallelDims(dp_shard=8, tp=tp, pp=pp),
                local_batch_size=batch,
                global_batch_size=8 * batch,
                pipeline=Pipeline(schedule=schedule),
            )
            for tp in (1, 2, 4)
            for batch in (8, 16, 32)
        ]

    for name, jobs in (
        ("no pipeline", flat),
        *((f"{pp} pipeline ranks, 1F1B", pipelines(pp, "1F1B")) for pp in (2, 4)),
        *((f"{pp} pipeline ranks, interleaved", pipelines(pp, "Interleaved1F1B")) for pp in (4, 8)),
    ):
        print(f"{name}: {rate(estimate_memory, jobs):,.0f} estimate_memory/s, ", end="")
        print(f"{rate(estimate_step_time, jobs):,.0f} estimate_step_time/s")


if __name__ == "__main__":
    main()
