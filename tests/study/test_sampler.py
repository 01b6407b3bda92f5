"""The sampler in studies of Optuna's that know nothing of titan-tune."""

import math
from dataclasses import replace

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from titan_tune.study.pool import PoolItem
from titan_tune.study.sampler import FeasibleSampler, Reading, distributions

AXES = {"ac": ("none", "full"), "compile": ("off", "default"), "batch": ("1", "2", "4")}
POOL = [
    PoolItem(f"{ac}-{mode}-{batch}", {"ac": ac, "compile": mode, "batch": batch}, 100.0 + place)
    for place, (ac, mode, batch) in enumerate(
        (a, c, b)
        for a in AXES["ac"]
        for c in AXES["compile"]
        for b in AXES["batch"]
        if (a, b) != ("none", "4")
    )
]
BY_CHOICES = {tuple(item.choices.values()): item for item in POOL}
DISTRIBUTIONS = distributions(AXES)


def new_study(**more):
    sampler = FeasibleSampler(POOL, AXES, **more)
    return optuna.create_study(direction="maximize", sampler=sampler), sampler


def truth(item):
    factor = 0.8 if item.choices["compile"] == "default" else 1.0
    return factor * item.predicted


def objective(trial):
    choices = tuple(trial.suggest_categorical(axis, labels) for axis, labels in AXES.items())
    return truth(BY_CHOICES[choices])


def add(study, item, value=None, state=TrialState.COMPLETE, **more):
    study.add_trial(
        create_trial(state=state, value=value, params=dict(item.choices), distributions=DISTRIBUTIONS, **more)
    )


def test_a_plain_optimize_runs_every_candidate_once_and_ends():
    study, _ = new_study()
    study.optimize(objective, n_trials=100)
    seen = [tuple(trial.params[axis] for axis in AXES) for trial in study.trials]
    assert sorted(seen) == sorted(BY_CHOICES)
    assert all(trial.state is TrialState.COMPLETE for trial in study.trials)


def test_a_plain_optimize_comes_within_one_per_cent_in_half_the_trials():
    study, _ = new_study()
    study.optimize(objective, n_trials=len(POOL) // 2)
    assert study.best_value >= 0.99 * max(map(truth, POOL))


def test_threads_of_one_optimize_never_run_the_same():
    study, _ = new_study()
    study.optimize(objective, n_trials=len(POOL), n_jobs=3)
    assert len({tuple(trial.params[axis] for axis in AXES) for trial in study.trials}) == len(POOL)


def test_asked_but_not_told_trials_are_not_suggested_again():
    study, sampler = new_study()
    asked = [study.ask(DISTRIBUTIONS) for _ in POOL]
    assert len({tuple(trial.params[axis] for axis in AXES) for trial in asked}) == len(POOL)
    assert sampler.proposal(study) is None
    with pytest.raises(ValueError, match="none is left"):
        study.ask(DISTRIBUTIONS)


def test_queued_trials_are_not_suggested():
    study, sampler = new_study()
    first = sampler.item(sampler.proposal(study))
    study.enqueue_trial(dict(first.choices))
    assert sampler.item(sampler.proposal(study)).config_id != first.config_id


def test_the_same_trials_give_the_same_suggestions():
    runs = []
    for _ in range(2):
        study, _ = new_study()
        study.optimize(objective, n_trials=6)
        runs.append([trial.params for trial in study.trials])
    assert runs[0] == runs[1]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_became_of_earlier_trials_suggestions_are_new_and_feasible(data):
    study, sampler = new_study()
    gone = set()
    for item in data.draw(st.lists(st.sampled_from(POOL), max_size=6)):
        state = data.draw(st.sampled_from([TrialState.COMPLETE, TrialState.FAIL, TrialState.RUNNING]))
        value = data.draw(st.floats(1.0, 1e6)) if state is TrialState.COMPLETE else None
        add(study, item, value, state)
        gone.add(item.config_id)
    proposal = sampler.proposal(study)
    if proposal is None:
        assert gone == {item.config_id for item in POOL}
    else:
        assert sampler.item(proposal).config_id not in gone


def test_blame_decides_what_runs_again():
    verdicts = {}
    study, sampler = new_study(blame=lambda trial: verdicts[trial.number])
    first = sampler.item(sampler.proposal(study))
    for number, (verdict, again) in enumerate(
        (("nobody", True), ("infrastructure", True), ("infrastructure", False))
    ):
        verdicts[number] = verdict
        add(study, first, state=TrialState.FAIL)
        assert (sampler.item(sampler.proposal(study)).config_id == first.config_id) is again


def test_a_failed_configuration_is_not_tried_again_and_lowers_its_neighbours():
    study, sampler = new_study()
    first = sampler.item(sampler.proposal(study))
    add(study, first, state=TrialState.FAIL)
    proposal = sampler.proposal(study)
    assert sampler.item(proposal).config_id != first.config_id
    assert proposal.success < 1.0


def test_the_baseline_counts_without_being_in_the_pool():
    base = PoolItem("base", {"ac": "base", "compile": "off", "batch": "1"}, 100.0)
    labels = {**AXES, "ac": (*AXES["ac"], "base")}
    sampler = FeasibleSampler(POOL, labels, baseline=base)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    before = sampler.proposal(study).expected
    study.add_trial(create_trial(value=80.0, params=dict(base.choices), distributions=distributions(labels)))
    after = sampler.proposal(study)
    assert after.expected == pytest.approx(0.8 * before, rel=0.1)
    assert math.isfinite(after.expected_gain)


def test_trials_of_other_configurations_and_useless_values_say_nothing():
    study, sampler = new_study()
    plain = sampler.proposal(study)
    study.add_trial(
        create_trial(value=1.0, params={"x": "1"}, distributions=distributions({"x": ("1", "2")}))
    )
    assert sampler.proposal(study) == plain
    add(study, POOL[0], math.inf)
    assert sampler.proposal(study) == plain


def test_readings_reach_the_proposer():
    """Durations that are read make the dear label's probes look dear."""
    dear = next(item for item in POOL if item.choices["compile"] == "default")
    cheap = replace(dear, choices={**dear.choices, "compile": "off"})
    seconds = {0: 600.0, 1: 10.0}
    study, sampler = new_study(reading=lambda trial: Reading(seconds[trial.number], 0.01))
    add(study, dear, 100.0)
    add(study, cheap, 100.0)
    proposal = sampler.proposal(study)
    compiled = sampler.item(proposal).choices["compile"] == "default"
    assert (proposal.seconds > 60.0) is compiled


def test_a_study_that_minimises_is_refused():
    sampler = FeasibleSampler(POOL, AXES)
    with pytest.raises(ValueError, match='direction="maximize"'):
        sampler.proposal(optuna.create_study(sampler=sampler))
