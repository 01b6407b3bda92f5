"""The search: ask, probe, tell, until the budget or the candidates end; then the finals.

One thread. Probes run in processes of their own, so the loop only starts, polls and records them. Everything
that matters is on disk before it is in the study, and in the study before the next probe starts: a search
that is killed at any moment goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from titan_tune.domain.candidate import Value
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.probe import (
    ProbeOutcome,
    ProbeProgress,
    ProbeSpec,
    ProbeStatus,
)
from titan_tune.errors import InterruptedSearchError, ProbesFailedError
from titan_tune.probe.record import read_outcome
from titan_tune.probe.runner import ProbeHandle, Runner
from titan_tune.probe.toml import probe_values
from titan_tune.study.budget import Spent, exhausted, expected_seconds, final_runs, remaining_seconds
from titan_tune.study.plan import Plan, Ranked
from titan_tune.study.propose import PoolItem
from titan_tune.study.records import Attr, Role, TrialRecord, record_of, records_of
from titan_tune.study.sampler import Blame, FeasibleSampler, distributions
from titan_tune.study.selection import baseline_id, final_schedule, winner
from titan_tune.study.storage import storage_errors
from titan_tune.study.trials import active_seconds, new_directory, predictions, tell
from titan_tune.titan.job import render

POLL_SECONDS = 0.2
FIRST_PROBE_SECONDS = 90.0
"""What a probe is expected to take before one was measured; seen on H200: 24 to 60 s, more with max-autotune."""
MIN_EXPECTED_GAIN = 0.001
"""Exploring ends when no candidate is expected to gain more than this fraction of the best."""
MIN_MEASURED_BEFORE_STOP = 4
MAX_CONSECUTIVE_INFRASTRUCTURE = 3
PRESSURE_SUCCESS = 0.7
"""Chance given to a candidate that fits only with allocation retries."""


@dataclass(frozen=True)
class Running:
    """One probe in flight, for display."""

    label: str
    role: Role
    progress: ProbeProgress


@dataclass(frozen=True)
class Snapshot:
    """The state of a search at one moment."""

    plan: Plan
    stage: str
    running: tuple[Running, ...]
    records: tuple[TrialRecord, ...]
    spent: Spent


class View(Protocol):
    """Whatever shows a search to a person."""

    def update(self, snapshot: Snapshot) -> None:
        """Draw the state; called a few times a second."""
        ...

    def finished(self, record: TrialRecord, label: str) -> None:
        """A probe ended."""
        ...

    def note(self, text: str) -> None:
        """One line that should stay visible."""
        ...


@dataclass
class _Flight:
    trial: Trial
    item: Ranked
    role: Role
    handle: ProbeHandle
    directory: Path


def pool_item(ranked: Ranked) -> PoolItem:
    """A plan's entry as the proposer sees it."""
    pressed = ranked.verdict is Verdict.PRESSURE
    return PoolItem(
        config_id=ranked.candidate.config_id,
        choices=ranked.candidate.choices,
        predicted=ranked.predicted_tokens_per_second,
        success=PRESSURE_SUCCESS if pressed else 1.0,
    )


def blame(trial: FrozenTrial) -> Blame:
    """Whom a failed trial is held against."""
    record = record_of(trial)
    if record is None or record.outcome.status is ProbeStatus.CANCELLED:
        return "nobody"
    return "configuration" if record.outcome.status.is_about_the_configuration else "infrastructure"


def make_sampler(plan: Plan) -> FeasibleSampler:
    """The sampler over a plan's pool."""
    base = pool_item(plan.baseline) if plan.baseline else None
    return FeasibleSampler([pool_item(r) for r in plan.pool], plan.labels(), baseline=base, blame=blame)


class Search:
    """One run of the search command over one study."""

    def __init__(
        self,
        plan: Plan,
        study: optuna.Study,
        sampler: FeasibleSampler,
        runner: Runner,
        directory: Path,
        view: View,
        *,
        url: str,
        device: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._study, self._sampler, self._runner = plan, study, sampler, runner
        self._directory, self._view, self._url, self._device = directory, view, url, device
        self._clock, self._begin = clock, clock()
        self._flights: list[_Flight] = []
        self._records: tuple[TrialRecord, ...] = ()
        self._explored: str | None = None
        self._infrastructure_streak = 0
        self._world_size = plan.space.cluster.world_size
        self._distributions = distributions(plan.labels())

    def run(self) -> str:
        """Search until done; returns why exploring ended.

        Raises:
            InterruptedSearchError: Ctrl-C or SIGTERM; running probes were stopped, everything is saved.
            ProbesFailedError: probes cannot run here, or none was measured.
            StorageError: the study storage failed; results stay in the trial folders and are told on resume.
        """
        try:
            self._recover()
            while self._advance():
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._cancel_all()
            done = sum(r.measurement is not None for r in self._records)
            raise InterruptedSearchError(
                f"stopped; what was measured ({done}) is saved in {self._directory}; the same command resumes"
            ) from None
        finally:
            self._runner.close()
        if winner(self._records) is None:
            raise ProbesFailedError(self._nothing_measured())
        return self._explored or "every candidate was measured"

    def _advance(self) -> bool:
        self._collect()
        while len(self._flights) < self._runner.slots:
            choice = self._next()
            if choice is None:
                break
            self._start(*choice)
        self._show()
        return bool(self._flights)

    def _collect(self) -> None:
        for flight in list(self._flights):
            outcome = flight.handle.poll()
            if outcome is not None:
                self._flights.remove(flight)
                self._finish(flight.trial, flight.item, outcome)

    def _finish(self, trial: Trial, item: Ranked | None, outcome: ProbeOutcome) -> None:
        tell(self._study, trial, outcome, capacity_gib=self._plan.space.cluster.gpu.memory_gib, url=self._url)
        self._refresh()
        record = next(r for r in self._records if r.number == trial.number)
        self._view.finished(record, item.label if item else record.config_id)
        infrastructure = outcome.status is ProbeStatus.INFRASTRUCTURE
        self._infrastructure_streak = self._infrastructure_streak + 1 if infrastructure else 0
        if self._infrastructure_streak >= MAX_CONSECUTIVE_INFRASTRUCTURE:
            raise ProbesFailedError(
                f"{MAX_CONSECUTIVE_INFRASTRUCTURE} probes in a row could not run: {outcome.message}"
                f" (see {self._directory / record.directory / 'stdout.log'})"
            )

    def _refresh(self) -> None:
        with storage_errors(self._url):
            self._records = records_of(self._study)

    # ---- what runs next

    def _next(self) -> tuple[Ranked, Role] | None:
        if self._plan.baseline and baseline_id(self._settled()) is None:
            busy = any(f.role is Role.BASELINE for f in self._flights)
            attempts = sum(r.role is Role.BASELINE and not _cancelled(r) for r in self._records)
            if busy:
                return None
            if attempts < FeasibleSampler.INFRASTRUCTURE_ATTEMPTS and self._may_start(reserved=False):
                return self._plan.baseline, Role.BASELINE
        if self._explored is None:
            found = self._explore()
            if found is not None:
                return found, Role.PROBE
        if self._explored is None or self._flights:
            return None
        return self._finalist()

    def _settled(self) -> list[TrialRecord]:
        return [r for r in self._records if r.outcome.status.is_about_the_configuration]

    def _explore(self) -> Ranked | None:
        if self._flights and self._exhausted(reserved=True):
            return None
        reason = self._exhausted(reserved=True)
        if reason:
            self._explored = reason
            return None
        with storage_errors(self._url):
            proposal = self._sampler.proposal(self._study)
        if proposal is None:
            self._explored = None if self._flights else "every candidate was measured"
            return None
        measured = sum(r.measurement is not None for r in self._records)
        if proposal.expected_gain < MIN_EXPECTED_GAIN and measured >= MIN_MEASURED_BEFORE_STOP:
            self._explored = f"no candidate is expected to gain more than {MIN_EXPECTED_GAIN:.1%}"
            return None
        return self._plan.by_id[self._sampler.item(proposal).config_id]

    def _finalist(self) -> tuple[Ranked, Role] | None:
        settings = self._plan.space.probe
        schedule = final_schedule(self._records, count=settings.finalists, repeats=settings.finalist_repeats)
        known = [config for config in schedule if config in self._plan.by_id]
        if not known or not self._may_start(reserved=False):
            return None
        return self._plan.by_id[known[0]], Role.FINALIST

    # ---- budget

    def spent(self) -> Spent:
        """Used so far."""
        return Spent.of(self._records, world_size=self._world_size, wall_seconds=self._clock() - self._begin)

    def _exhausted(self, *, reserved: bool) -> str | None:
        space = self._plan.space
        base = baseline_id(self._records)
        measured = len({r.config_id for r in self._records if r.measurement} - {base})
        pool = len(self._plan.pool)
        final = final_runs(space.budget, space.probe, pool_size=pool, measured=measured) if reserved else 0
        return exhausted(
            space.budget,
            self.spent(),
            world_size=self._world_size,
            next_seconds=expected_seconds(self._records, default=FIRST_PROBE_SECONDS),
            reserved_runs=final,
            in_flight=len(self._flights),
        )

    def _limit(self) -> float | None:
        """Seconds that a probe may take when the budget allows less than its own timeout, else ``None``."""
        space = self._plan.space
        left = remaining_seconds(space.budget, self.spent(), world_size=self._world_size)
        return left if left is not None and left < space.probe.timeout_seconds else None

    def _may_start(self, *, reserved: bool) -> bool:
        return self._exhausted(reserved=reserved) is None

    # ---- starting and stopping

    def _start(self, item: Ranked, role: Role) -> None:
        candidate = item.candidate
        directory = new_directory(self._directory, candidate.config_id)
        attrs: dict[str, Any] = {
            Attr.ROLE: role,
            Attr.CONFIG_ID: candidate.config_id,
            Attr.DIRECTORY: str(directory.relative_to(self._directory)),
            Attr.VALUES: dict(candidate.values),
            Attr.PREDICTED: predictions(item),
            Attr.CUT_BY_BUDGET: self._limit() is not None,
        }
        with storage_errors(self._url):
            self._study.enqueue_trial(dict(candidate.choices), user_attrs=attrs)
            trial = self._study.ask(self._distributions)
        handle = self._runner.start(self._spec(candidate.values, candidate.config_id, directory))
        self._flights.append(_Flight(trial, item, role, handle, directory))

    def _spec(self, values: Mapping[str, Value], config_id: str, directory: Path) -> ProbeSpec:
        space = self._plan.space
        job = space.base.with_values(values)
        settings = space.probe
        limit = self._limit()
        if limit is not None:
            settings = settings.model_copy(
                update={"timeout_seconds": min(settings.timeout_seconds, max(limit, 1.0))}
            )
        overrides = probe_values(job.resolved(), settings, directory, self._device)
        tokens = space.global_batch_size * int(job.get("training.seq_len"))
        return ProbeSpec(
            config_id=config_id,
            directory=directory,
            toml=render(space.base, {**values, **overrides}),
            nproc_per_node=space.cluster.gpus_per_node,
            device=self._device,
            settings=settings,
            cache_directory=self._directory / "cache",
            tokens_per_step_per_rank=tokens / self._world_size,
            baseline_losses=self._baseline_losses(),
        )

    def _baseline_losses(self) -> tuple[float, ...]:
        measured = (r.measurement for r in self._records if r.role is Role.BASELINE and r.measurement)
        return next((m.losses for m in measured), ())

    def _cancel_all(self) -> None:
        for flight in list(self._flights):
            self._flights.remove(flight)
            self._finish(flight.trial, flight.item, flight.handle.cancel())

    # ---- resuming

    def _recover(self) -> None:
        with storage_errors(self._url):
            left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
        for frozen in left:
            self._recover_one(frozen)
        self._refresh()
        if self._records:
            self._view.note(f"resuming: {len(self._records)} probes are in the study already")

    def _recover_one(self, frozen: FrozenTrial) -> None:
        if frozen.state is TrialState.WAITING:
            with storage_errors(self._url):
                # taken out of the queue: what to run next is decided anew
                trial = self._study.ask(self._distributions)
        else:
            trial = Trial(self._study, frozen._trial_id)
        name = frozen.user_attrs.get(Attr.DIRECTORY)
        outcome = read_outcome(self._directory / name) if name else None
        if outcome is None:
            seconds = active_seconds(self._directory / name) if name else 0.0
            outcome = ProbeOutcome(ProbeStatus.CANCELLED, "the search ended while it ran", seconds)
        tell(self._study, trial, outcome, capacity_gib=self._plan.space.cluster.gpu.memory_gib, url=self._url)

    # ---- showing

    def _show(self) -> None:
        running = tuple(Running(f.item.label, f.role, f.handle.progress()) for f in self._flights)
        stage = "finals" if self._explored else "exploring"
        if any(f.role is Role.BASELINE for f in self._flights):
            stage = "baseline"
        self._view.update(Snapshot(self._plan, stage, running, self._records, self.spent()))

    def _nothing_measured(self) -> str:
        if not self._records:
            return f"no probe was started: {self._explored or 'nothing to run'}"
        last = self._records[-1]
        counts = ", ".join(sorted({str(r.outcome.status) for r in self._records}))
        return (
            f"none of {len(self._records)} probes was measured ({counts}); the last: {last.outcome.message}"
        )


def _cancelled(record: TrialRecord) -> bool:
    return record.outcome.status is ProbeStatus.CANCELLED
