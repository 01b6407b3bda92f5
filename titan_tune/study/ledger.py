"""The trials of a study as the searches that share it see them: claimed, renewed, told, given up, found again.

Three rules make every probe count once (docs/decisions/0007-shared-studies.md):

- A trial enters the study running, whole, in one write. Optuna numbers trials in the order of these writes, so of two
  searches that want the same thing the one with the lower number has it, and the other one sees that.
- Only the first tell of a trial holds. Nobody's outcome is overwritten.
- An outcome that comes too late, because its trial was given up, enters as a trial of its own that names the other.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from titan_tune.domain.probe import ProbeOutcome, ProbeStatus
from titan_tune.errors import StorageError
from titan_tune.probe.record import outcome_to_dict
from titan_tune.study.lease import LEASE_SECONDS, Fate, Lease, Owner, Watch, fate
from titan_tune.study.records import Attr, Role, TrialRecord, collect, is_lost, record_of
from titan_tune.study.storage import public_url, storage_errors
from titan_tune.units import GIB

MEMORY = "memory"
"""Name of the constraint that a completed trial carries."""


@dataclass(frozen=True, slots=True)
class Held:
    """A running trial."""

    number: int
    config_id: str
    role: Role
    directory: str
    """Relative to the study's folder."""
    lease: Lease | None
    mine: bool
    withdrawn: bool
    gone: bool
    """Whether the search that runs it has ended, as far as is known."""

    @property
    def is_awaited(self) -> bool:
        """Whether another search is running it right now."""
        left = self.lease is None or self.lease.released
        return not (self.mine or self.withdrawn or self.gone or left)

    @property
    def seconds(self) -> float:
        """How long it had run when its search last said so."""
        return self.lease.seconds if self.lease else 0.0

    def __str__(self) -> str:
        return f"#{self.number} of {self.lease.owner}" if self.lease else f"#{self.number}"


class Ledger:
    """One search's view of a study, and the only writer of its own trials."""

    def __init__(
        self,
        study: optuna.Study,
        *,
        url: str,
        runner: str,
        outlives: bool,
        folder: str,
        distributions: Mapping[str, BaseDistribution],
        capacity_gib: float,
        patience: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``runner`` is the runner's name; ``outlives`` whether its probes go on without the search."""
        self._study, self._url, self._clock = study, url, clock
        self._distributions, self._capacity_gib = dict(distributions), capacity_gib
        self.owner = Owner.this_process()
        self._lease = Lease(self.owner, runner, outlives, folder)
        self._watch = Watch(patience)
        self._mine: set[int] = set()
        self._trials: Sequence[FrozenTrial] = ()
        self._known: dict[int, TrialRecord | None] = {}
        self.records: tuple[TrialRecord, ...] = ()
        """Every finished probe as of the last :meth:`refresh`, oldest first."""
        self.running: tuple[Held, ...] = ()
        """Every trial that ran at the last :meth:`refresh`, this search's own too."""

    def refresh(self) -> None:
        """Read the study.

        Raises:
            StorageError: it cannot be read.
        """
        with storage_errors(self._url):
            self._trials = self._study.get_trials(deepcopy=False)
        before = len(self._known)
        for trial in self._trials:
            if trial.state.is_finished() and trial.number not in self._known:
                self._known[trial.number] = record_of(trial)
        if len(self._known) > before:
            self.records = collect(record for record in self._known.values() if record is not None)
        running = [trial for trial in self._trials if trial.state is TrialState.RUNNING]
        gone = self._gone({t.number: Lease.from_dict(t.user_attrs.get(Attr.LEASE)) for t in running})
        self.running = tuple(self._held(trial, trial.number in gone) for trial in running)

    def _gone(self, leases: Mapping[int, Lease | None]) -> set[int]:
        """The trials, other than this search's own, whose search has ended."""
        others = {n: lease for n, lease in leases.items() if lease and n not in self._mine}
        expired = self._watch.expired(others, self._clock())
        fates = {number: fate(lease.owner, self.owner) for number, lease in others.items()}
        return {n for n, f in fates.items() if f is Fate.GONE or (f is Fate.ELSEWHERE and n in expired)}

    def _held(self, trial: FrozenTrial, gone: bool = False) -> Held:
        attrs = trial.user_attrs
        return Held(
            number=trial.number,
            config_id=attrs.get(Attr.CONFIG_ID, ""),
            role=Role(attrs.get(Attr.ROLE, Role.PROBE)),
            directory=attrs.get(Attr.DIRECTORY, ""),
            lease=Lease.from_dict(attrs.get(Attr.LEASE)),
            mine=trial.number in self._mine,
            withdrawn=Attr.WITHDRAWN in attrs,
            gone=gone,
        )

    @property
    def directions(self) -> list[StudyDirection]:
        """The study's."""
        with storage_errors(self._url):
            return self._study.directions

    def get_trials(self, deepcopy: bool = False) -> Sequence[FrozenTrial]:
        """The trials as of the last :meth:`refresh`, for whoever would ask the study for them."""
        return self._trials

    def attributes(self, number: int) -> Mapping[str, Any]:
        """A trial's user attributes as of the last :meth:`refresh`."""
        return self._frozen(number).user_attrs

    # ---- own trials

    def claim(self, choices: Mapping[str, str], attrs: Mapping[str, Any]) -> Held:
        """A new running trial of this search; :attr:`records` and :attr:`running` are as of just after it.

        Every trial with a lower number was claimed before, and is among them.
        """
        lease = self._lease.to_dict()
        with storage_errors(self._url):
            self._study.add_trial(
                create_trial(
                    state=TrialState.RUNNING,
                    params=dict(choices),
                    distributions=self._distributions,
                    user_attrs={**attrs, Attr.LEASE: lease},
                )
            )
        self.refresh()
        mine = next(
            trial.number
            for trial in reversed(self._trials)
            if trial.user_attrs.get(Attr.DIRECTORY) == attrs[Attr.DIRECTORY]
            and trial.user_attrs.get(Attr.LEASE) == lease
        )
        self._mine.add(mine)
        self.running = tuple(dataclasses.replace(h, mine=h.number in self._mine) for h in self.running)
        return next(held for held in self.running if held.number == mine)

    def withdraw(self, number: int) -> None:
        """Take a claim back: its probe was not started."""
        self._end(number, {Attr.WITHDRAWN: True})

    def renew(self, seconds: Mapping[int, float]) -> None:
        """Renew this search's leases; ``seconds`` is how long each of its trials has run.

        A lease that another search has taken over is left alone.
        """
        for held in self.running:
            if held.number in seconds and held.lease and held.lease.owner == self.owner:
                self._set(held.number, Attr.LEASE, held.lease.renewed(seconds[held.number]).to_dict())

    def release(self, number: int, seconds: float) -> None:
        """Leave a trial running for a later search."""
        lease = dataclasses.replace(self._lease.renewed(seconds), released=True)
        self._set(number, Attr.LEASE, lease.to_dict())
        self._mine.discard(number)

    def take_over(self, number: int) -> None:
        """Make another search's trial this one's: its probe was found running."""
        lease = self._lease.renewed(self._frozen(number).user_attrs[Attr.LEASE]["seconds"])
        self._set(number, Attr.LEASE, lease.to_dict())
        self._mine.add(number)

    def tell(self, number: int, outcome: ProbeOutcome) -> TrialRecord:
        """Record how a trial ended, once, whoever else tries; returns the record that holds the outcome.

        May be called again after a :class:`StorageError`, whatever had been written by then.
        """
        outcome = as_told(outcome, self._frozen(number).user_attrs)
        first = self._tell(number, outcome)
        self.refresh()
        if not self._frozen(number).state.is_finished():
            raise StorageError(f"{public_url(self._url)}: trial {number} could not be ended")
        if not first and is_lost(self._frozen(number)):
            self._add(number, outcome)
            self.refresh()
        self._mine.discard(number)
        return next(record for record in self.records if number in (record.number, record.adopts))

    def _tell(self, number: int, outcome: ProbeOutcome) -> bool:
        """Whether this was the first tell of the trial."""
        value = self._value(outcome)
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._set(number, Attr.OUTCOME, outcome_to_dict(outcome))
        # a trial of its own says how Optuna writes constraints down; Trial.set_constraint reads the trial three times
        constrained = create_trial(state=TrialState.FAIL, constraints=self._constraints(outcome))
        trial_id = self._frozen(number)._trial_id
        try:
            with storage_errors(self._url):
                for name, excess in constrained.system_attrs.items():
                    self._study._storage.set_trial_system_attr(trial_id, name, excess)
        except UpdateFinishedTrialError:
            return False
        return self._finish(number, state, value)

    def _add(self, number: int, outcome: ProbeOutcome) -> None:
        """A trial of its own for an outcome whose trial was given up."""
        if any(trial.user_attrs.get(Attr.ADOPTS) == number for trial in self._trials):
            return
        lost = self._frozen(number)
        value = self._value(outcome)
        attrs = {key: kept for key, kept in lost.user_attrs.items() if key != Attr.WITHDRAWN}
        with storage_errors(self._url):
            self._study.add_trial(
                create_trial(
                    state=TrialState.FAIL if value is None else TrialState.COMPLETE,
                    value=value,
                    params=lost.params,
                    distributions=lost.distributions,
                    user_attrs={**attrs, Attr.OUTCOME: outcome_to_dict(outcome), Attr.ADOPTS: number},
                    constraints=self._constraints(outcome),
                )
            )

    def _value(self, outcome: ProbeOutcome) -> float | None:
        completed = outcome.status is ProbeStatus.COMPLETED and outcome.measurement is not None
        return outcome.measurement.tokens_per_second_per_gpu if completed and outcome.measurement else None

    def _constraints(self, outcome: ProbeOutcome) -> dict[str, float]:
        """Feasible at or below zero; on every completed trial, because Optuna takes one without for feasible."""
        measurement = outcome.measurement
        if outcome.status is not ProbeStatus.COMPLETED or measurement is None:
            return {}
        excess = measurement.peak_device_bytes / GIB - self._capacity_gib
        return {MEMORY: excess if measurement.memory_kind == "cuda" else 0.0}

    # ---- trials whose search is gone

    def abandoned(self) -> list[Held]:
        """Running trials that this search may take over or give up, as of the last :meth:`refresh`."""
        return [held for held in self.running if self._is_abandoned(held)]

    def _is_abandoned(self, held: Held) -> bool:
        lease = held.lease
        if held.mine:
            return False
        if lease is None or held.withdrawn or lease.owner == self.owner:
            # of an older version; taken back half-way; or claimed by this search in a write that seemed to fail
            return True
        if lease.outlives and (lease.runner, lease.folder) != (self._lease.runner, self._lease.folder):
            return False  # its probe may still run, and this search could not find it
        return held.gone or lease.released

    def has_files_of(self, held: Held) -> bool:
        """Whether the trial's folder is on this search's disk."""
        return held.lease is None or held.lease.folder == self._lease.folder

    def give_up(self, number: int, seconds: float = 0.0) -> None:
        """End a trial whose search is gone and which left no outcome; ``seconds`` is how long it ran at least."""
        held = self._held(self._frozen(number))
        attrs: dict[str, Any] = {}
        if held.lease is None:
            attrs[Attr.LEASE] = self._lease.renewed(seconds).to_dict()
        elif seconds > held.lease.seconds:
            attrs[Attr.LEASE] = dataclasses.replace(held.lease, seconds=seconds).to_dict()
        self._end(number, attrs)

    def drop_queued(self) -> None:
        """End trials that wait in Optuna's queue: older versions queued what they ran, and may have died before."""
        for trial in self._trials:
            if trial.state is TrialState.WAITING:
                self._end(trial.number, {Attr.WITHDRAWN: True})

    def lost_here(self) -> list[tuple[int, Path]]:
        """Trials that were given up, nobody has found again, and whose folders are on this disk: number, folder."""
        heirs = {trial.user_attrs.get(Attr.ADOPTS) for trial in self._trials}
        return [
            (trial.number, Path(trial.user_attrs[Attr.DIRECTORY]))
            for trial in self._trials
            if is_lost(trial) and trial.number not in heirs and self.has_files_of(self._held(trial))
        ]

    def find_again(self, number: int, outcome: ProbeOutcome) -> None:
        """Add the outcome of a trial that was given up."""
        self._add(number, as_told(outcome, self._frozen(number).user_attrs))
        self.refresh()

    # ---- plumbing

    def _frozen(self, number: int) -> FrozenTrial:
        return self._trials[number]

    def _set(self, number: int, name: str, value: Any) -> None:
        try:
            with storage_errors(self._url):
                self._study._storage.set_trial_user_attr(self._frozen(number)._trial_id, name, value)
        except UpdateFinishedTrialError:
            return  # ended by another search; telling finds out

    def _end(self, number: int, attrs: Mapping[str, Any]) -> None:
        """Fail a trial, unless somebody ended it first."""
        self._mine.discard(number)  # should this fail, it is found as one that nobody runs
        for name, value in attrs.items():
            self._set(number, name, value)
        self._finish(number, TrialState.FAIL, None)
        self.refresh()

    def _finish(self, number: int, state: TrialState, value: float | None) -> bool:
        """Set a trial's final state; ``False`` when it has one. Storages do this for one caller only."""
        values = None if value is None else [value]
        try:
            with storage_errors(self._url):
                return self._study._storage.set_trial_state_values(
                    self._frozen(number)._trial_id, state, values
                )
        except UpdateFinishedTrialError:
            return False


def as_told(outcome: ProbeOutcome, attrs: Mapping[str, Any]) -> ProbeOutcome:
    """The outcome as the study keeps it: a timeout that the budget had set is nobody's fault."""
    if outcome.status is ProbeStatus.TIMEOUT and attrs.get(Attr.CUT_BY_BUDGET):
        message = f"stopped because the budget ended: {outcome.message}"
        return dataclasses.replace(outcome, status=ProbeStatus.CANCELLED, message=message)
    return outcome
