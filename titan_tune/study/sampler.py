"""The proposer as an Optuna sampler over a finite set of candidates."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from titan_tune.study.pool import Observation, Pool, PoolItem
from titan_tune.study.propose import Proposal, propose

Blame = Literal["configuration", "infrastructure", "nobody"]


class Reading(NamedTuple):
    """What a finished trial tells besides its value."""

    seconds: float | None = None
    """How long it took, where that is known."""
    noise: float = 0.0
    """Standard error of its value as a fraction of it, where that is known."""


@dataclass
class _Seen:
    """What a study's trials say of the pool."""

    observations: list[Observation] = field(default_factory=list)
    pending: list[PoolItem] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)


class Trials(Protocol):
    """Whoever knows the trials of a study: the study, or a reader that has them already."""

    @property
    def directions(self) -> list[StudyDirection]:
        """Of the study's values."""
        ...

    def get_trials(self, deepcopy: bool = True) -> Sequence[FrozenTrial]:
        """All of them, by number."""
        ...


class FeasibleSampler(BaseSampler):
    """Suggests only members of ``pool``, the one with the largest expected gain per second next.

    Every axis is a categorical parameter, and the study maximises. Finished trials are observations: a completed
    one with its value, a failed one as ``blame`` says: a failure of its configuration, of the infrastructure
    (suggested once more) or nobody's (as if it had never run). Running and queued trials are not suggested again,
    and count as if they had measured what is expected of them. Nothing is drawn at random: the same trials give
    the same suggestion.

    ``reading`` tells what a finished trial says besides its value; by default nothing, since the clock of a study whose
    objective is replayed says nothing, and suggestions would not repeat.
    """

    INFRASTRUCTURE_ATTEMPTS = 2

    def __init__(
        self,
        pool: Sequence[PoolItem],
        labels: Mapping[str, Sequence[str]],
        *,
        baseline: PoolItem | None = None,
        blame: Callable[[FrozenTrial], Blame] = lambda trial: "configuration",
        reading: Callable[[FrozenTrial], Reading] = lambda trial: Reading(),
    ) -> None:
        self._pool = Pool.of(pool)
        self._distributions = distributions(labels)
        known = [*self._pool.items, *([baseline] if baseline else [])]
        self._by_choices = {_key(item.choices): item for item in known}
        self._blame, self._reading = blame, reading
        self._lock = Lock()
        self._promised: defaultdict[str, dict[int, PoolItem]] = defaultdict(dict)
        """By study and trial number: suggested, and not in the study yet (threads of one ``study.optimize``)."""

    def proposal(self, study: Trials) -> Proposal | None:
        """What :meth:`sample_relative` would suggest now; ``None`` when nothing is left to measure.

        Raises:
            ValueError: the study does not maximise a single value.
        """
        return self._proposal(study, {})

    def _proposal(self, study: Trials, promised: Mapping[int, PoolItem]) -> Proposal | None:
        if study.directions != [StudyDirection.MAXIMIZE]:
            raise ValueError(
                'FeasibleSampler maximises throughput: create the study with direction="maximize"'
            )
        seen = self._read(study, promised)
        return propose(self._pool, seen.observations, excluded=frozenset(seen.excluded), pending=seen.pending)

    def _read(self, study: Trials, promised: Mapping[int, PoolItem]) -> _Seen:
        seen, attempts = _Seen(), Counter[str]()
        for trial in study.get_trials(deepcopy=False):
            item = self._by_choices.get(_key(_parameters(trial)))
            item = item or promised.get(trial.number)
            if item is None:
                continue
            if not trial.state.is_finished():
                seen.pending.append(item)
            elif trial.state is TrialState.COMPLETE and _is_measured(trial):
                seen.observations.append(Observation(item, trial.value, *self._reading(trial)))
                seen.excluded.add(item.config_id)
            elif trial.state is TrialState.FAIL:
                blame = self._blame(trial)
                attempts[item.config_id] += blame == "infrastructure"
                if blame == "configuration":
                    seen.observations.append(Observation(item, None, *self._reading(trial)))
                    seen.excluded.add(item.config_id)
                elif attempts[item.config_id] >= self.INFRASTRUCTURE_ATTEMPTS:
                    seen.excluded.add(item.config_id)
            else:
                seen.excluded.add(item.config_id)
        measured = {o.item.config_id for o in seen.observations}
        # measured already and running again, as finalists do: what it will say is known
        seen.pending = [item for item in seen.pending if item.config_id not in measured]
        return seen

    def item(self, proposal: Proposal) -> PoolItem:
        """The candidate a proposal names."""
        return self._pool.items[proposal.index]

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """One categorical parameter an axis."""
        return dict(self._distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The choices of the proposed candidate; empty when nothing is left."""
        with self._lock:
            promised = self._promised[study.study_name]
            proposal = self._proposal(study, promised)
            if proposal is None:
                return {}
            item = promised[trial.number] = self.item(proposal)
        return dict(item.choices)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """End ``study.optimize`` with the last candidate, as Optuna's GridSampler does."""
        with self._lock:
            promised = self._promised[study.study_name]
            is_last = self._proposal(study, promised) is None
            promised.pop(trial.number, None)
        if is_last:
            with suppress(RuntimeError):  # told, not optimised: whoever asks is told by :meth:`proposal`
                study.stop()

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse: a parameter on its own could leave the feasible set."""
        raise ValueError(f"{param_name}: FeasibleSampler suggests whole candidates only, and none is left")


def distributions(labels: Mapping[str, Sequence[str]]) -> dict[str, BaseDistribution]:
    """The categorical distribution of every axis."""
    return {axis: CategoricalDistribution(tuple(values)) for axis, values in labels.items()}


def _parameters(trial: FrozenTrial) -> Mapping[str, Any]:
    """A trial's parameters; of one that is queued, those that it will have."""
    fixed: Mapping[str, Any] = trial.system_attrs.get("fixed_params", {})
    return trial.params or (fixed if trial.state is TrialState.WAITING else {})


def _is_measured(trial: FrozenTrial) -> bool:
    return trial.value is not None and math.isfinite(trial.value) and trial.value > 0.0


def _key(choices: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((axis, str(label)) for axis, label in choices.items()))
