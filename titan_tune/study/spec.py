"""From a candidate to the run that measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import ProbeSpec
from titan_tune.probe.toml import probe_values
from titan_tune.space.axes import Space
from titan_tune.study.records import Role, TrialRecord
from titan_tune.titan.job import render


def probe_spec(
    space: Space,
    values: Mapping[str, Value],
    config_id: str,
    directory: Path,
    *,
    device: str,
    cache_directory: Path,
    records: Sequence[TrialRecord] = (),
    limit: float | None = None,
    beat: float | None = None,
) -> ProbeSpec:
    """The probe of ``values`` in the trial folder ``directory``.

    ``limit`` is how many seconds the budget leaves it, where that is less than its own timeout. ``records`` tell the
    losses of the baseline, which every later probe is compared with.
    """
    job, settings, cluster = space.base.with_values(values), space.probe, space.cluster
    if limit is not None:
        seconds = min(settings.timeout_seconds, max(limit, 1.0))
        settings = settings.model_copy(update={"timeout_seconds": seconds})
    overrides = probe_values(job.resolved(), settings, directory, device)
    tokens = space.global_batch_size * int(job.get("training.seq_len"))
    return ProbeSpec(
        config_id=config_id,
        directory=directory,
        toml=render(space.base, {**values, **overrides}),
        nproc_per_node=cluster.gpus_per_node,
        num_nodes=cluster.num_nodes,
        device=device,
        settings=settings,
        cache_directory=cache_directory,
        tokens_per_step_per_rank=tokens / cluster.world_size,
        baseline_losses=_baseline_losses(records),
        beat=beat,
    )


def _baseline_losses(records: Sequence[TrialRecord]) -> tuple[float, ...]:
    measured = (r.measurement for r in records if r.role is Role.BASELINE and r.measurement)
    return next((m.losses for m in measured), ())
