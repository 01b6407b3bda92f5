"""The searches that are compared: ours, and what people use.

Each is a generator over one case: it yields the config id to measure next and is sent what the probe said. All begin
after the job as it was has been measured, and know the same feasible candidates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from titan_tune.study.choose import MIN_EXPECTED_GAIN, MIN_MEASURED_BEFORE_STOP
from titan_tune.study.plan import Plan
from titan_tune.study.pool import PoolItem
from titan_tune.study.sampler import FeasibleSampler, Reading, distributions
from titan_tune.study.table import Draw, MeasuredTable

Search = Generator[str, Draw, None]
MODEL_STOP = 5
"""DeepSpeed autotuning's tuner_early_stopping: experiments in a row without improvement."""
HAND_ORDER = ("activation_checkpoint", "compile", "float8", "local_batch_size")
"""The order practitioners go through; layouts and whatever else comes after."""
TPE_ATTEMPTS = 200
"""Suggestions in a row that are infeasible or known before one is drawn at random; they cost nothing here."""


@dataclass(frozen=True)
class Case:
    """A table with what a search may know of it."""

    plan: Plan
    table: MeasuredTable
    items: Mapping[str, PoolItem]
    """Feasible candidates with a row, best prediction first, the job as it was among them."""
    baseline: str
    """Where every search begins."""
    has_job: bool
    """Whether that is the job as it was, and not what stands in for it."""

    @cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return self.plan.labels()

    @cached_property
    def by_choices(self) -> dict[tuple[tuple[str, str], ...], str]:
        return {tuple(sorted(item.choices.items())): config for config, item in self.items.items()}

    def find(self, choices: Mapping[str, str]) -> str | None:
        """Config id of these choices, if they are feasible and in the table."""
        return self.by_choices.get(tuple(sorted(choices.items())))


Strategy = Callable[[Case, Draw, int], Search]


def ours(case: Case, first: Draw, seed: int) -> Search:
    """``FeasibleSampler`` in a study of Optuna's; it knows no chance, so the seed changes nothing."""
    dists = distributions(case.labels)
    pool = [item for item in case.items.values() if item.config_id != case.baseline]
    sampler = FeasibleSampler(pool, case.labels, baseline=case.items[case.baseline], reading=_reading)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.add_trial(_trial(case, case.baseline, first, dists))
    measured = first.tokens_per_second is not None
    while (proposal := sampler.proposal(study)) is not None:
        if proposal.expected_gain < MIN_EXPECTED_GAIN and measured >= MIN_MEASURED_BEFORE_STOP:
            return
        config = sampler.item(proposal).config_id
        drawn = yield config
        measured += drawn.tokens_per_second is not None
        study.add_trial(_trial(case, config, drawn, dists))


def _reading(trial: FrozenTrial) -> Reading:
    return Reading(trial.user_attrs["seconds"], trial.user_attrs["noise"])


def tpe(case: Case, first: Draw, seed: int) -> Search:
    """Optuna's default sampler over the axes; what is not feasible or already known is asked again."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    dists = distributions(case.labels)
    study.add_trial(_trial(case, case.baseline, first, dists))
    left = set(case.items) - {case.baseline}
    rng = random.Random(seed)
    trial: optuna.Trial | None
    while left:
        for _ in range(TPE_ATTEMPTS):
            trial = study.ask(dists)
            config = case.find(trial.params)
            if config in left:
                break
            study.tell(trial, state=TrialState.FAIL)
        else:
            config, trial = rng.choice(sorted(left)), None
        assert config is not None
        left.discard(config)
        drawn = yield config
        if trial is None:
            study.add_trial(_trial(case, config, drawn, dists))
        elif drawn.tokens_per_second is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, drawn.tokens_per_second)


def _trial(case: Case, config: str, drawn: Draw, dists: dict[str, BaseDistribution]) -> FrozenTrial:
    return create_trial(
        state=TrialState.FAIL if drawn.tokens_per_second is None else TrialState.COMPLETE,
        value=drawn.tokens_per_second,
        params=dict(case.items[config].choices),
        distributions=dists,
        user_attrs={"seconds": drawn.seconds, "noise": drawn.noise},
    )


def at_random(case: Case, first: Draw, seed: int) -> Search:
    """Without replacement."""
    order = sorted(set(case.items) - {case.baseline})
    random.Random(seed).shuffle(order)
    for config in order:
        _ = yield config  # not "yield from": a list takes no answers


def grid(case: Case, first: Draw, seed: int) -> Search:
    """In the order of the space file, the last axis fastest."""
    place = {axis: {label: n for n, label in enumerate(labels)} for axis, labels in case.labels.items()}

    def key(config: str) -> list[int]:
        return [place[axis][label] for axis, label in case.items[config].choices.items()]

    for config in sorted(set(case.items) - {case.baseline}, key=key):
        _ = yield config


def by_hand(case: Case, first: Draw, seed: int) -> Search:
    """One axis at a time from the job as it was, keeping what was best; again until nothing changes."""
    best, speed = case.baseline, first.tokens_per_second or 0.0
    known = {case.baseline}
    axes = [axis for axis in HAND_ORDER if axis in case.labels]
    axes += [axis for axis in case.labels if axis not in axes]
    improved = True
    while improved:
        improved = False
        for axis in axes:
            start = dict(case.items[best].choices)
            for label in case.labels[axis]:
                config = case.find({**start, axis: label})
                if config is None or config in known:
                    continue
                known.add(config)
                drawn = yield config
                if drawn.tokens_per_second is not None and drawn.tokens_per_second > speed:
                    best, speed, improved = config, drawn.tokens_per_second, True


def model_order(case: Case, first: Draw, seed: int) -> Search:
    """Best prediction first, nothing learned, until ``MODEL_STOP`` in a row are no improvement."""
    speed, without = first.tokens_per_second or 0.0, 0
    for config in sorted(case.items, key=lambda c: (-case.items[c].predicted, c)):
        if config == case.baseline:
            continue
        drawn = yield config
        better = drawn.tokens_per_second is not None and drawn.tokens_per_second > speed
        without = 0 if better else without + 1
        speed = max(speed, drawn.tokens_per_second or 0.0)
        if without >= MODEL_STOP:
            return


STRATEGIES: Mapping[str, Strategy] = {
    "titan-tune": ours,
    "model order": model_order,
    "one axis at a time": by_hand,
    "Optuna TPE": tpe,
    "random": at_random,
    "grid": grid,
}
