"""The proposer as an Optuna sampler over a finite set of candidates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from titan_tune.study.propose import Observation, Pool, PoolItem, Proposal, propose

Blame = Literal["configuration", "infrastructure", "nobody"]


class FeasibleSampler(BaseSampler):
    """Suggests only members of ``pool``, the one with the largest expected gain next.

    Every axis is a categorical parameter. Finished trials are observations: a completed one with its value,
    a failed one as ``blame`` says: a failure of its configuration, of the infrastructure (suggested once more)
    or nobody's (as if it had never run). Running trials are not suggested again.
    """

    INFRASTRUCTURE_ATTEMPTS = 2

    def __init__(
        self,
        pool: Sequence[PoolItem],
        labels: Mapping[str, Sequence[str]],
        *,
        baseline: PoolItem | None = None,
        blame: Callable[[FrozenTrial], Blame] = lambda trial: "configuration",
    ) -> None:
        self._pool = Pool.of(pool)
        self._distributions = distributions(labels)
        known = [*self._pool.items, *([baseline] if baseline else [])]
        self._by_choices = {_key(item.choices): item for item in known}
        self._blame = blame

    def proposal(self, study: optuna.Study) -> Proposal | None:
        """What :meth:`sample_relative` would suggest now; ``None`` when nothing is left to measure."""
        observations: list[Observation] = []
        excluded: set[str] = set()
        attempts: Counter[str] = Counter()
        for trial in study.get_trials(deepcopy=False):
            item = self._by_choices.get(_key(trial.params))
            if item is None or trial.state is TrialState.WAITING:
                continue
            if trial.state is TrialState.COMPLETE and trial.value is not None and math.isfinite(trial.value):
                observations.append(Observation(item.choices, item.predicted, trial.value))
            elif trial.state is TrialState.FAIL:
                blame = self._blame(trial)
                attempts[item.config_id] += blame == "infrastructure"
                if blame == "configuration":
                    observations.append(Observation(item.choices, item.predicted, None))
                elif attempts[item.config_id] < self.INFRASTRUCTURE_ATTEMPTS:
                    continue
            excluded.add(item.config_id)
        return propose(self._pool, observations, excluded=frozenset(excluded))

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
        proposal = self.proposal(study)
        return dict(self.item(proposal).choices) if proposal else {}

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


def _key(choices: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((axis, str(label)) for axis, label in choices.items()))
