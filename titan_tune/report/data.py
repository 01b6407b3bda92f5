"""Everything a report shows, as plain data: study info + records → :class:`ReportData`. Pure.

Throughputs are tokens/s per GPU (per process where the job runs on CPU processes) and are medians of measured
steps, or what a dry run predicts: ``origin`` says which. Memory is GiB; times are seconds unless the name says
otherwise. Strings that come from a study are kept as they are: whoever writes them into a page escapes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_tune.domain.probe import Measurement, Origin, ProbeSettings, ProbeStatus
from titan_tune.report.analysis import Comparison, Effect, axis_effects, compare_memory, compare_throughput
from titan_tune.report.answer import Answer, Choices, Price, answer, memory_of, numerics, price
from titan_tune.report.dry_runs import DryRuns, dry_runs
from titan_tune.report.rows import Axis, Configuration, Coverage, Rejection, Step, TrialRow, label_of
from titan_tune.report.timing import PhaseTime, where_time_went
from titan_tune.report.trend import TrendTable, trend_table
from titan_tune.space.enumerate import BASE_LABEL
from titan_tune.study.info import StudyInfo
from titan_tune.study.numerics import layout_effects, start_values
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import Standing, baseline_id, standings, winner

SCHEMA = 1
SECONDS_PER_MINUTE = 60.0
TABLES_OF_DETAILS = ("phases", "trend", "dry_run")
"""Details of an outcome that are shown in tables of their own or judged elsewhere."""
VERSIONS = ("python", "driver", "cuda")
"""Of the study's environment. The host's name stays out: reports are committed and published."""


@dataclass(frozen=True, slots=True)
class Method:
    """How it was measured."""

    hardware: str
    device: str
    model: str
    seq_len: int
    global_batch_size: int
    gpus: int
    capacity_gib: float
    versions: tuple[tuple[str, str], ...]
    probe: ProbeSettings
    measured_steps: tuple[int, int] | None
    """Fewest and most measured steps of a completed probe."""
    dry_runs: DryRuns | None
    """``None`` where there were none."""
    begun: str
    made: str


@dataclass(frozen=True, slots=True)
class ReportData:
    """A whole report."""

    study: str
    job: str
    worker: str
    """``GPU`` or ``process``: what throughput is per and hours are counted in."""
    export_command: str
    answer: Answer | None
    price: Price
    configurations: tuple[Configuration, ...]
    """Fastest first."""
    steps: tuple[Step, ...]
    throughput: Comparison
    memory: Comparison
    effects: tuple[Effect, ...]
    trials: tuple[TrialRow, ...]
    trend: TrendTable
    coverage: Coverage
    phases: tuple[PhaseTime, ...]
    """Where the probes' wall time went; empty where it is not known."""
    method: Method
    axes: tuple[Axis, ...]
    common: Choices
    """Axes on which every probe had the same label; labels leave them out."""

    @property
    def has_dry_runs(self) -> bool:
        """Whether any probe was a dry run."""
        return any(t.origin is Origin.DRY_RUN for t in self.trials)

    @property
    def all_dry_runs(self) -> bool:
        """Whether every probe was a dry run, and there were some."""
        return bool(self.trials) and all(t.origin is Origin.DRY_RUN for t in self.trials)

    @property
    def failures(self) -> tuple[TrialRow, ...]:
        """Probes that measured nothing."""
        return tuple(t for t in self.trials if t.tokens_per_second is None)

    @property
    def warnings(self) -> tuple[tuple[int, str], ...]:
        """Trial number and what its probe warned of."""
        return tuple((t.number, warning) for t in self.trials for warning in t.warnings)

    @property
    def repeated(self) -> tuple[Configuration, ...]:
        """Configurations that ran more than once."""
        return tuple(c for c in self.configurations if c.runs > 1)

    @property
    def baseline_failed(self) -> TrialRow | None:
        """The probe of the job as it was, when none of its runs was measured."""
        if any(c.is_baseline for c in self.configurations):
            return None
        return next((t for t in self.failures if t.role == Role.BASELINE), None)


def report_data(
    study: str, info: StudyInfo, records: Sequence[TrialRecord], *, made: str, export_command: str
) -> ReportData:
    """Everything a report shows.

    ``made`` is the report's date (UTC, ISO 8601); ``export_command`` is the shell line that writes the winner.

    Raises:
        InputError: the study's base job is not one that this version can read.
    """
    start = dict(next((r.choices for r in records if r.role is Role.BASELINE), {}))
    common = common_choices(records)
    distinct = {r.config_id: distinct_choices(r.choices, leave_out=common) for r in records}
    labels = {config_id: label_of(choices) for config_id, choices in distinct.items()}
    ranked, best = standings(records), winner(records)
    found = answer(info, best, start=start, start_values=start_values(records)) if best else None
    return ReportData(
        study=study,
        job=info.job_name,
        worker="process" if info.cluster.gpu.is_cpu else "GPU",
        export_command=export_command,
        answer=found,
        price=price(records, found, world_size=info.cluster.world_size),
        configurations=_configurations(info, ranked, records, distinct, start),
        steps=_steps(records, labels, world_size=info.cluster.world_size),
        throughput=compare_throughput(ranked, labels),
        memory=compare_memory(ranked, labels),
        effects=axis_effects(ranked, info.axes, start=start),
        trials=tuple(_trial(r, distinct) for r in records),
        trend=trend_table(info, records, best, labels),
        coverage=_coverage(info, records),
        phases=where_time_went(records),
        method=_method(info, records, made=made),
        axes=tuple(
            Axis(name, tuple(labels), name in info.numerics_axes) for name, labels in info.axes.items()
        ),
        common=tuple(common.items()),
    )


def common_choices(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Axes on which all of several configurations have the same label; none for a single configuration."""
    if len({r.config_id for r in records}) < 2:
        return {}
    first = records[0].choices
    return {
        axis: label for axis, label in first.items() if all(r.choices.get(axis) == label for r in records)
    }


def distinct_choices(choices: Mapping[str, str], *, leave_out: Mapping[str, str]) -> Choices:
    """The choices on the axes that tell probes apart."""
    return tuple((axis, label) for axis, label in choices.items() if axis not in leave_out)


def _configurations(
    info: StudyInfo,
    ranked: Sequence[Standing],
    records: Sequence[TrialRecord],
    distinct: Mapping[str, Choices],
    start: Mapping[str, str],
) -> tuple[Configuration, ...]:
    job, keys = info.base(), start_values(records)
    best = winner(records)
    base = best.baseline if best else None
    return tuple(
        Configuration(
            config_id=s.config_id,
            choices=distinct[s.config_id],
            tokens_per_second=s.tokens_per_second,
            interval=s.interval,
            runs=len(s.runs),
            spread=s.spread,
            final=s.final,
            is_baseline=base is not None and s.config_id == base.config_id,
            is_best=best is not None and s.config_id == best.standing.config_id,
            changes_numerics=bool(
                numerics(info, s.latest.choices, start)
                or layout_effects(job, info.cluster, s.latest.values, keys)
            ),
            gain=s.tokens_per_second / base.tokens_per_second - 1.0 if base else None,
            origin=s.origin,
            memory=memory_of(s),
        )
        for s in sorted(ranked, key=lambda s: (-s.tokens_per_second, s.config_id))
    )


def _steps(records: Sequence[TrialRecord], labels: Mapping[str, str], *, world_size: int) -> tuple[Step, ...]:
    minutes, best, steps = 0.0, None, []
    base = baseline_id(records)
    for record in records:
        minutes += record.outcome.gpu_seconds(world_size) / SECONDS_PER_MINUTE
        measured = record.tokens_per_second
        if measured is not None and record.role is not Role.FINALIST:
            best = max(best or 0.0, measured)
        steps.append(
            Step(
                number=record.number,
                role=str(record.role),
                label=labels[record.config_id],
                is_baseline=record.config_id == base,
                gpu_minutes=minutes,
                origin=record.outcome.origin,
                tokens_per_second=measured,
                status=str(record.outcome.status),
                best_so_far=best,
            )
        )
    return tuple(steps)


def _trial(record: TrialRecord, distinct: Mapping[str, Choices]) -> TrialRow:
    outcome, measurement = record.outcome, record.measurement
    return TrialRow(
        number=record.number,
        role=str(record.role),
        status=str(outcome.status),
        origin=outcome.origin,
        seconds=outcome.seconds,
        choices=distinct[record.config_id],
        tokens_per_second=record.tokens_per_second,
        final_loss=_last_loss(measurement),
        alloc_retries=measurement.alloc_retries if measurement else None,
        time_to_first_step=measurement.time_to_first_step if measurement else None,
        folder=record.directory.name,
        message=outcome.message,
        details=tuple(
            (str(name), str(value))
            for name, value in sorted(outcome.details.items())
            if name not in TABLES_OF_DETAILS
        ),
        warnings=outcome.warnings,
    )


def _last_loss(measurement: Measurement | None) -> float | None:
    losses = [loss for loss in measurement.losses if math.isfinite(loss)] if measurement else []
    return losses[-1] if losses else None


def _coverage(info: StudyInfo, records: Sequence[TrialRecord]) -> Coverage:
    rejected = [
        Rejection(rule, count, info.rejection_examples.get(rule, "")) for rule, count in info.rejected.items()
    ]
    # a job that no combination of the axes gives is not one of the candidates
    outside = {r.config_id for r in records if BASE_LABEL in r.choices.values()}
    of_memory = {r.config_id for r in records if r.outcome.status is ProbeStatus.OOM}
    return Coverage(
        total=info.total,
        duplicates=max(0, info.total - sum(info.rejected.values()) - info.candidates),
        rejected=tuple(sorted(rejected, key=lambda r: (-r.count, r.rule))),
        candidates=info.candidates,
        tried=len({r.config_id for r in records} - outside),
        measured=len({r.config_id for r in records if r.measurement}),
        out_of_memory=len(of_memory),
    )


def _method(info: StudyInfo, records: Sequence[TrialRecord], *, made: str) -> Method:
    base, cluster = info.base(), info.cluster
    steps = [r.measurement.measured_steps for r in records if r.measurement]
    nodes = f"{cluster.num_nodes} nodes × " if cluster.num_nodes > 1 else ""
    dry = dry_runs(info, records)
    here = info.environment.get(
        "gpu"
    )  # where the study began: not what the job is for where dry runs simulated it
    is_target = dry is None or dry.is_target
    name = "CPU process" if cluster.gpu.is_cpu else (here if is_target and here else cluster.gpu.name)
    return Method(
        hardware=f"{nodes}{cluster.gpus_per_node} × {name}",
        device=info.device,
        model=f"{base.model.name} {base.model.flavor}",
        seq_len=int(base.get("training.seq_len")),
        global_batch_size=info.global_batch_size,
        gpus=cluster.world_size,
        capacity_gib=cluster.gpu.memory_gib,
        versions=versions(info.environment),
        probe=ProbeSettings.model_validate(info.probe),
        measured_steps=(min(steps), max(steps)) if steps else None,
        dry_runs=dry,
        begun=info.created,
        made=made,
    )


def versions(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Packages, interpreter and driver that the study recorded; those it does not know are left out."""
    packages = environment.get("packages")
    found = dict(packages) if isinstance(packages, Mapping) else {}
    found |= {name: environment.get(name) for name in VERSIONS}
    return tuple((str(name), str(value)) for name, value in found.items() if value)
