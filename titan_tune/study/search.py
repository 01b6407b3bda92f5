"""The search: choose, probe, tell, until the budget or the candidates end; then the finals.

One thread. Probes run in processes of their own, so the loop only starts, polls and records them. Everything
that matters is on disk before it is in the study, and in the study before the next probe starts: a search
that is killed at any moment goes on from there. Several searches may work on one study at once (``study.ledger``).
While the storage is away, probes in flight go on, and what they came to is told when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import ProbeOutcome, ProbeSpec, ProbeStatus
from titan_tune.errors import InterruptedSearchError, ProbesFailedError, StorageError
from titan_tune.probe.record import read_outcome, write_outcome
from titan_tune.probe.runner import DetachableRunner, ProbeHandle, Runner
from titan_tune.study.choose import Choice, Chooser
from titan_tune.study.lease import LEASE_SECONDS, RENEW_SECONDS
from titan_tune.study.ledger import Held, Ledger
from titan_tune.study.outage import Outage
from titan_tune.study.plan import Plan
from titan_tune.study.records import Attr, Role, TrialRecord
from titan_tune.study.sampler import FeasibleSampler, distributions
from titan_tune.study.selection import winner
from titan_tune.study.spec import probe_spec
from titan_tune.study.trials import active_seconds, folder_id, new_directory, predictions
from titan_tune.study.view import Running, Snapshot, View
from titan_tune.units import format_duration

POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0
STORAGE_PATIENCE_SECONDS = 900.0
MAX_CONSECUTIVE_INFRASTRUCTURE = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a search does what, in seconds."""

    poll: float = field(default_factory=lambda: POLL_SECONDS)
    """Looking at its probes."""
    watch: float = WATCH_SECONDS
    """Reading the study while it has a free slot and nothing to start: others may have told something."""
    renew: float = RENEW_SECONDS
    """Renewing its leases."""
    lease: float = LEASE_SECONDS
    """Until a search elsewhere that stopped renewing counts as gone."""
    patience: float = STORAGE_PATIENCE_SECONDS
    """How long it waits for a storage that does not answer, once no probe runs."""


@dataclass
class _Flight:
    number: int
    label: str
    role: Role
    handle: ProbeHandle
    directory: Path


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
        pace: Pace | None = None,
        leave: Callable[[int], bool] = lambda probes: False,
    ) -> None:
        """``leave`` is asked on Ctrl-C, with the number of probes in flight, whether they go on without the search;
        only where the runner's probes can."""
        self._plan, self._runner, self._directory, self._view = plan, runner, directory, view
        self._device, self._clock, self._leave = device, clock, leave
        self._pace = pace or Pace()
        self._jobs = runner if isinstance(runner, DetachableRunner) else None
        self._ledger = Ledger(
            study,
            url=url,
            runner=runner.name,
            outlives=self._jobs is not None,
            folder=folder_id(directory),
            distributions=distributions(plan.labels()),
            capacity_gib=plan.space.cluster.gpu.memory_gib,
            patience=self._pace.lease,
            clock=clock,
        )
        self._chooser = Chooser(
            plan,
            sampler,
            self._ledger,
            isolated=self._jobs is not None,
            gpus=getattr(runner, "gpus_per_probe", None),
            clock=clock,
        )
        self._outage = Outage(self._pace.patience)
        self._flights: list[_Flight] = []
        self._kept: list[tuple[_Flight, ProbeOutcome]] = []
        """Ended, on disk, not yet told."""
        self._shown: set[int] = set()
        self._broken: list[TrialRecord] = []
        """Probes in a row that the infrastructure failed."""
        self._next_exchange = self._next_renewal = clock()
        self._waiting = self._contended = False

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Every finished probe of the study, as last read."""
        return self._ledger.records

    def run(self) -> str:
        """Search until done; returns why exploring ended.

        Raises:
            InterruptedSearchError: Ctrl-C or SIGTERM; running probes were stopped or left, everything is saved.
            ProbesFailedError: probes cannot run here, or none was measured.
            StorageError: the storage failed and did not come back; results are in the trial folders, told on resume.
        """
        self._ledger.owner.enter()
        try:
            self._resume()
            while self._advance():
                time.sleep(self._pace.poll)
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except ProbesFailedError:
            self._cancel_all()
            with suppress(StorageError):
                self._tell_kept()
            raise
        finally:
            self._ledger.owner.leave()
            self._runner.close()
        if winner(self._ledger.records) is None:
            raise ProbesFailedError(self._nothing_measured())
        return self._chooser.explored or "every candidate was measured"

    def _advance(self) -> bool:
        """One turn; whether there is anything left to do or to wait for."""
        self._collect()
        now = self._clock()
        if (self._kept or now >= self._next_exchange) and self._outage.may_try(now):
            try:
                self._exchange()
            except StorageError as error:
                self._storage_failed(error)
            else:
                self._storage_answered()
        self._hold_to_the_budget()
        self._show()
        busy = self._flights or self._kept or self._contended or self._outage.is_on
        return bool(busy) or self._awaits_others()

    def _collect(self) -> None:
        for flight in list(self._flights):
            outcome = flight.handle.poll()
            if outcome is not None:
                self._keep(flight, outcome)

    def _keep(self, flight: _Flight, outcome: ProbeOutcome) -> None:
        """A probe ended: on disk first, in the study as soon as the storage takes it."""
        if read_outcome(flight.directory) is None:
            write_outcome(flight.directory, outcome)
        self._flights.remove(flight)
        self._kept.append((flight, outcome))

    # ---- the study

    def _exchange(self) -> None:
        """Tell, read, take care of what others left, renew, start."""
        if self._kept:
            self._tell_kept()
            self._stop_if_nothing_runs_here()
        else:
            self._ledger.refresh()
        self._recover()
        self._show_finished()
        now = self._clock()
        if now >= self._next_renewal:
            self._ledger.renew(self._own_seconds())
            self._next_renewal = now + self._pace.renew
        self._contended = not self._fill()
        if self._contended:
            self._next_exchange = now
        elif len(self._flights) >= self._runner.slots:
            self._next_exchange = self._next_renewal
        else:
            self._next_exchange = self._clock() + self._pace.watch

    def _fill(self) -> bool:
        """Start what there is to start; ``False`` when another search was first, so that there may be more."""
        while len(self._flights) < self._runner.slots:
            choice = self._chooser.next()
            if choice is None:
                break
            if not self._start(choice):
                return False
        return True

    def _tell_kept(self) -> None:
        while self._kept:
            flight, outcome = self._kept[0]
            record = self._ledger.tell(flight.number, outcome)
            del self._kept[0]
            self._shown.add(record.number)
            self._view.finished(record, flight.label)
            infrastructure = outcome.status is ProbeStatus.INFRASTRUCTURE
            self._broken = [*self._broken, record] if infrastructure else []

    def _stop_if_nothing_runs_here(self) -> None:
        if len(self._broken) >= MAX_CONSECUTIVE_INFRASTRUCTURE:
            last = self._broken[-1]
            raise ProbesFailedError(
                f"{MAX_CONSECUTIVE_INFRASTRUCTURE} probes in a row could not run: {last.outcome.message}"
                f" (see {self._directory / last.directory / 'stdout.log'})"
            )

    def _own_seconds(self) -> dict[int, float]:
        return {flight.number: flight.handle.progress().seconds for flight in self._flights}

    def _awaits_others(self) -> bool:
        others = [held for held in self._ledger.running if held.is_awaited]
        waits = bool(others) and not self._chooser.is_out_of_time()
        if waits and not self._flights and not self._waiting:
            self._view.note(f"waiting for another search of this study: {', '.join(map(str, others))}")
        self._waiting = waits and not self._flights
        return waits

    def _storage_failed(self, error: StorageError) -> None:
        now = self._clock()
        if not self._outage.is_on:
            self._view.note(f"storage unreachable, {self._kept_text()}; trying again: {error}")
        self._outage.failed(error, now)
        if self._outage.is_too_long(now) and not self._flights:
            waited = format_duration(self._pace.patience)
            raise StorageError(
                f"{error}; not back within {waited}: {self._kept_text()} in {self._directory}, told by the same"
                " command"
            ) from error

    def _storage_answered(self) -> None:
        if self._outage.is_on:
            self._outage.worked()
            self._view.note("the storage is back; nothing was lost")

    def _kept_text(self) -> str:
        return f"{len(self._kept)} result{'' if len(self._kept) == 1 else 's'} kept"

    # ---- starting

    def _start(self, choice: Choice) -> bool:
        """Claim a trial and launch its probe; ``False`` when another search was first."""
        candidate, limit = choice.item.candidate, self._chooser.limit()
        directory = new_directory(self._directory, candidate.config_id)
        attrs: dict[str, Any] = {
            Attr.ROLE: choice.role,
            Attr.CONFIG_ID: candidate.config_id,
            Attr.DIRECTORY: str(directory.relative_to(self._directory)),
            Attr.VALUES: dict(candidate.values),
            Attr.PREDICTED: predictions(choice.item),
            Attr.CUT_BY_BUDGET: limit is not None,
        }
        held = None
        try:
            held = self._ledger.claim(candidate.choices, attrs)
            if not self._chooser.admits(held):
                self._ledger.withdraw(held.number)
                held = None
        finally:
            if held is None:
                with suppress(OSError):
                    directory.rmdir()
        if held is None:
            return False
        spec = self._spec(candidate.values, candidate.config_id, directory, limit=limit, beat=choice.beat)
        handle = self._runner.start(spec)
        self._flights.append(_Flight(held.number, choice.item.label, choice.role, handle, directory))
        return True

    def _spec(
        self,
        values: Mapping[str, Value],
        config_id: str,
        directory: Path,
        *,
        limit: float | None = None,
        beat: float | None = None,
    ) -> ProbeSpec:
        return probe_spec(
            self._plan.space, values, config_id, directory,
            device=self._device, cache_directory=self._directory / "cache", records=self.records,
            limit=limit, beat=beat,
        )  # fmt: skip

    # ---- stopping

    def _interrupted(self) -> InterruptedSearchError:
        left = len(self._flights) if self._jobs and self._flights and self._leave(len(self._flights)) else 0
        with suppress(StorageError):  # what is not told now is found on resume
            if left:
                self._leave_running()
            else:
                self._cancel_all()
            self._tell_kept()
        done = sum(r.measurement is not None for r in self._ledger.records)
        parts = [f"stopped; what was measured ({done}) is saved in {self._directory}"]
        if left:
            parts.append(f"{left} probe{'s' if left > 1 else ''} left running")
        if self._kept:
            parts.append(f"{self._kept_text()} there for the storage, which does not answer")
        return InterruptedSearchError("; ".join([*parts, "the same command resumes"]))

    def _leave_running(self) -> None:
        assert self._jobs is not None
        self._jobs.detach()
        flights, self._flights = self._flights, []
        for flight in flights:
            self._ledger.release(flight.number, flight.handle.progress().seconds)

    def _cancel_all(self) -> None:
        for flight in list(self._flights):
            self._keep(flight, flight.handle.cancel())

    def _hold_to_the_budget(self) -> None:
        if self._flights and self._chooser.is_overrun(self._own_seconds()):
            self._view.note("the GPU-hours are used up: stopping the probes in flight")
            self._cancel_all()

    # ---- resuming

    def _resume(self) -> None:
        self._ledger.refresh()
        self._ledger.drop_queued()
        self._recover()
        for number, name in self._ledger.lost_here():
            outcome = read_outcome(self._directory / name)
            if outcome is not None and outcome.status is not ProbeStatus.CANCELLED:
                self._ledger.find_again(number, outcome)
        self._shown = {record.number for record in self._ledger.records}
        kept = sum(r.outcome.status is not ProbeStatus.CANCELLED for r in self._ledger.records)
        if kept:
            self._view.note(f"resuming: {kept} probe{'s are' if kept > 1 else ' is'} in the study already")

    def _recover(self) -> None:
        for held in self._ledger.abandoned():
            self._recover_one(held)

    def _recover_one(self, held: Held) -> None:
        """A trial whose search is gone: tell what it came to, go on with it, or give it up."""
        if held.withdrawn or (held.lease and held.lease.owner == self._ledger.owner):
            self._ledger.withdraw(held.number)
            return
        here = bool(held.directory) and self._ledger.has_files_of(held)
        directory = self._directory / held.directory
        outcome = read_outcome(directory) if here else None
        if outcome is not None:
            self._ledger.tell(held.number, outcome)
            return
        if here and self._jobs is not None and held.lease is not None and held.lease.outlives:
            values = self._ledger.attributes(held.number)[Attr.VALUES]
            handle = self._jobs.attach(self._spec(values, held.config_id, directory))
            if handle is not None:
                self._ledger.take_over(held.number)
                self._flights.append(
                    _Flight(held.number, self._label(held.config_id), held.role, handle, directory)
                )
                return
        self._ledger.give_up(held.number, active_seconds(directory) if here else 0.0)

    # ---- showing

    def _label(self, config_id: str) -> str:
        ranked = self._plan.by_id.get(config_id)
        return ranked.label if ranked else config_id

    def _show_finished(self) -> None:
        """What other searches told since the last look."""
        for record in self._ledger.records:
            if record.number not in self._shown:
                self._shown.add(record.number)
                self._view.finished(record, self._label(record.config_id))

    def _show(self) -> None:
        running = tuple(Running(f.label, f.role, f.handle.progress()) for f in self._flights)
        stage = "finals" if self._chooser.explored else "exploring"
        if any(f.role is Role.BASELINE for f in self._flights):
            stage = "baseline"
        elsewhere = sum(held.is_awaited for held in self._ledger.running)
        self._view.update(
            Snapshot(self._plan, stage, running, self._ledger.records, self._chooser.spent(), elsewhere)
        )

    def _nothing_measured(self) -> str:
        records: tuple[TrialRecord, ...] = self._ledger.records
        if not records:
            return f"no probe was started: {self._chooser.explored or 'nothing to run'}"
        last = records[-1]
        counts = ", ".join(sorted({str(r.outcome.status) for r in records}))
        return f"none of {len(records)} probes was measured ({counts}); the last: {last.outcome.message}"
