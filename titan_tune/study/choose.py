"""What a search runs next, and whether the budget allows it, as the study stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from titan_tune.domain.probe import ProbeStatus
from titan_tune.study.budget import Spent, exhausted, expected_seconds, final_runs, remaining_seconds
from titan_tune.study.ledger import Held, Ledger
from titan_tune.study.plan import Plan, Ranked
from titan_tune.study.prospects import pool_item, reading
from titan_tune.study.records import Role, TrialRecord, completed, record_of
from titan_tune.study.sampler import Blame, FeasibleSampler
from titan_tune.study.selection import baseline_id, final_schedule, finalists

FIRST_PROBE_SECONDS = 90.0
"""What a probe is expected to take before one was measured; seen on H200: 24 to 60 s, more with max-autotune."""
MIN_EXPECTED_GAIN = 0.001
"""Exploring ends when no candidate is expected to gain more than this fraction of the best."""
MIN_MEASURED_BEFORE_STOP = 4
BEAT_MARGIN = 0.02
"""A probe may be stopped once it is surely slower than the best so far by more than this."""


def blame(trial: FrozenTrial) -> Blame:
    """Whom a failed trial is held against."""
    record = record_of(trial)
    if record is None or record.outcome.status is ProbeStatus.CANCELLED:
        return "nobody"
    return "configuration" if record.outcome.status.is_about_the_configuration else "infrastructure"


def make_sampler(plan: Plan) -> FeasibleSampler:
    """The sampler over a plan's pool."""
    pool = [pool_item(ranked, plan) for ranked in plan.pool]
    base = pool_item(plan.baseline, plan) if plan.baseline else None
    return FeasibleSampler(pool, plan.labels(), baseline=base, blame=blame, reading=reading)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run next."""

    item: Ranked
    role: Role
    beat: float | None = None
    """Tokens/s per GPU below which the probe is of no use."""


class Chooser:
    """Baseline, then exploring, then the finals. Asked and answered between two reads of the ledger."""

    def __init__(
        self,
        plan: Plan,
        sampler: FeasibleSampler,
        ledger: Ledger,
        *,
        isolated: bool,
        gpus: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``isolated`` is whether probes in flight leave each other alone: only then finals run side by side.
        ``gpus`` are those that a probe takes, by default the job's."""
        self._plan, self._sampler, self._ledger, self._isolated = plan, sampler, ledger, isolated
        self._clock, self._begin = clock, clock()
        self._gpus = gpus or plan.space.cluster.world_size
        self._world_size = plan.space.cluster.world_size
        self.explored: str | None = None
        """Why exploring ended, once it has."""

    # ---- what runs next

    def next(self) -> Choice | None:
        """What to start now; ``None`` when there is nothing, or nothing yet."""
        records = self._ledger.records
        if self._plan.baseline and baseline_id(_settled(records)) is None:
            if any(held.role is Role.BASELINE for held in self._active()):
                return None
            attempts = sum(r.role is Role.BASELINE and not _cancelled(r) for r in records)
            if attempts < FeasibleSampler.INFRASTRUCTURE_ATTEMPTS and not self._exhausted(reserved=False):
                return Choice(self._plan.baseline, Role.BASELINE)
        if self.explored is None:
            found = self._explore()
            if found is not None:
                return Choice(found, Role.PROBE, beat=self._beat())
        if self.explored is None or any(held.role is not Role.FINALIST for held in self._active()):
            return None
        return self._finalist()

    def _active(self) -> list[Held]:
        """Probes that run now, here or in another search."""
        return [held for held in self._ledger.running if held.mine or held.is_awaited]

    def _explore(self) -> Ranked | None:
        reason = self._exhausted(reserved=True)
        if reason:
            self.explored = None if self._active() else reason
            return None
        proposal = self._sampler.proposal(self._ledger)
        if proposal is None:
            self.explored = None if self._active() else "every candidate was measured"
            return None
        measured = sum(r.measurement is not None for r in self._ledger.records)
        if proposal.expected_gain < MIN_EXPECTED_GAIN and measured >= MIN_MEASURED_BEFORE_STOP:
            self.explored = f"no candidate is expected to gain more than {MIN_EXPECTED_GAIN:.1%}"
            return None
        return self._plan.by_id[self._sampler.item(proposal).config_id]

    def _beat(self) -> float | None:
        lows = [r.measurement.interval[0] for r in completed(self._ledger.records) if r.measurement]
        return max(lows) * (1.0 - BEAT_MARGIN) if lows else None

    def _finalist(self) -> Choice | None:
        settings = self._plan.space.probe
        schedule = final_schedule(
            self._ledger.records, count=settings.finalists, repeats=settings.finalist_repeats
        )
        for held in self._active():
            if not self._isolated and held.mine:
                return None
            if held.config_id in schedule:
                schedule.remove(held.config_id)
        known = [config for config in schedule if config in self._plan.by_id]
        if not known or self._exhausted(reserved=False):
            return None
        return Choice(self._plan.by_id[known[0]], Role.FINALIST)

    def admits(self, held: Held) -> bool:
        """Whether a claim may be kept: nobody was there before it, and the budget holds for it.

        Only trials with a lower number count. Each of them was there to be seen by this claim, and none of them
        need see it: so of several claims for the same thing exactly the first is kept.
        """
        before = [r for r in self._ledger.records if r.number < held.number]
        running = [h for h in self._ledger.running if h.number < held.number and not h.withdrawn]
        same = [r for r in _settled(before) if (r.config_id, r.role) == (held.config_id, held.role)]
        rivals = [h for h in running if (h.config_id, h.role) == (held.config_id, held.role)]
        allowed = self._plan.space.probe.finalist_repeats if held.role is Role.FINALIST else 1
        if len(same) + len(rivals) >= allowed:
            return False
        reserved = held.role is Role.PROBE
        return self._exhausted(reserved=reserved, spent=self._spent(before), in_flight=len(running)) is None

    # ---- budget

    def spent(self) -> Spent:
        """Used so far: by the whole study, but for the wall clock, which is this search's."""
        return self._spent(self._ledger.records)

    def _spent(self, records: Sequence[TrialRecord]) -> Spent:
        return Spent.of(records, world_size=self._world_size, wall_seconds=self._clock() - self._begin)

    def _exhausted(
        self, *, reserved: bool, spent: Spent | None = None, in_flight: int | None = None
    ) -> str | None:
        space, records = self._plan.space, self._ledger.records
        base = baseline_id(records)
        measured = len(set(finalists(records, count=space.probe.finalists)) - {base})
        pool = len(self._plan.pool)
        final = final_runs(space.budget, space.probe, pool_size=pool, measured=measured) if reserved else 0
        return exhausted(
            space.budget,
            spent or self.spent(),
            world_size=self._gpus,
            next_seconds=self._next_seconds(),
            reserved_runs=final,
            in_flight=len(self._in_flight()) if in_flight is None else in_flight,
        )

    def _next_seconds(self) -> float:
        return expected_seconds(self._ledger.records, default=FIRST_PROBE_SECONDS)

    def _in_flight(self) -> list[Held]:
        """Every probe that may still cost something: of this search, of others, and those left running."""
        return [held for held in self._ledger.running if not held.withdrawn]

    def limit(self) -> float | None:
        """Seconds that the next probe may take when the budget allows less than its own timeout, else ``None``.

        Probes in flight count as what they are expected to take.
        """
        space = self._plan.space
        expected = self._next_seconds()
        flying = sum(max(expected, held.seconds) for held in self._in_flight()) * self._gpus
        spent = self.spent()
        spent = Spent(spent.probes, spent.gpu_seconds + flying, spent.wall_seconds)
        left = remaining_seconds(space.budget, spent, world_size=self._gpus)
        return left if left is not None and left < space.probe.timeout_seconds else None

    def is_overrun(self, own_seconds: Mapping[int, float]) -> bool:
        """Whether probes side by side have used up the GPU-hours together. ``own_seconds`` is how long each of this
        search's probes has run; a probe alone has a timeout of its own for that."""
        limit = self._plan.space.budget.max_gpu_hours
        flying = self._in_flight()
        if limit is None or len(flying) < 2:
            return False
        seconds = sum(own_seconds.get(held.number, held.seconds) for held in flying)
        return self.spent().gpu_seconds + seconds * self._gpus > limit * 3600.0

    def is_out_of_time(self) -> bool:
        """Whether this search's wall clock is used up."""
        hours = self._plan.space.budget.max_wall_clock_hours
        return hours is not None and self._clock() - self._begin >= hours * 3600.0


def _settled(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    return [r for r in records if r.outcome.status.is_about_the_configuration]


def _cancelled(record: TrialRecord) -> bool:
    return record.outcome.status is ProbeStatus.CANCELLED
