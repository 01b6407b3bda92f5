"""What failures teach about other candidates."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.study.failures import ALONE, success_chance
from titan_tune.study.pool import Observation, Pool, PoolItem

AXES = {"ac": ("none", "op", "full"), "compile": ("off", "default", "max"), "batch": ("1", "2", "4", "8")}
POOL = [
    PoolItem("-".join(labels), dict(zip(AXES, labels, strict=True)), 100.0)
    for labels in itertools.product(*AXES.values())
]
BY_ID = {item.config_id: item for item in POOL}
CANDIDATES = Pool.of(POOL)


def failed(config_id):
    return Observation(BY_ID[config_id], None)


def ran(config_id):
    return Observation(BY_ID[config_id], 100.0)


def chances(*observations):
    """Config id to its chance."""
    return dict(zip(BY_ID, success_chance(CANDIDATES, observations), strict=True))


def test_without_failures_only_the_memory_estimate_counts():
    doubtful = [PoolItem("a", {}, 1.0, success=0.5), PoolItem("b", {}, 1.0)]
    assert success_chance(Pool.of(doubtful), []) == pytest.approx([0.5 * (1 - ALONE), 1 - ALONE])
    assert set(chances(ran("op-off-1")).values()) == {1 - ALONE}


def test_two_failures_with_one_label_in_common_blame_it():
    """Where something ran with every other label that they have."""
    after = chances(ran("none-off-2"), ran("op-off-1"), failed("none-max-1"), failed("op-max-2"))
    assert after["full-max-4"] < 0.2
    assert after["full-default-4"] > 0.85


def test_a_label_that_ran_is_not_to_blame():
    after = chances(ran("none-max-1"), failed("op-max-2"))
    assert after["full-max-4"] == pytest.approx(after["full-default-4"], abs=0.1)
    assert after["op-default-2"] < after["full-default-1"]


def test_a_pair_of_labels_is_to_blame_where_each_ran_alone():
    seen = [ran("none-default-1"), ran("op-max-1"), ran("op-max-2"), ran("none-off-2")]
    after = chances(*seen, failed("none-max-1"), failed("none-max-2"))
    assert after["none-max-4"] < 0.3
    assert min(after["none-default-4"], after["op-max-4"]) > 0.85


def test_more_of_what_was_too_much_is_too_much_as_well():
    seen = [ran("none-off-1"), ran("none-off-2"), ran("full-off-8")]
    after = chances(*seen, failed("none-off-4"), failed("none-default-4"))
    assert after["none-off-8"] < 0.5
    assert min(after["none-default-1"], after["full-default-8"], after["op-off-4"]) > 0.75


def test_less_of_what_was_too_much_may_run():
    after = chances(ran("none-off-1"), failed("none-off-8"), failed("none-max-8"))
    assert after["none-default-4"] > after["none-default-8"]


def test_two_causes_are_told_apart():
    seen = [ran("op-off-1"), ran("full-default-2"), ran("op-default-2")]
    after = chances(
        *seen, failed("op-max-1"), failed("full-max-2"), failed("none-off-1"), failed("none-default-2")
    )
    assert after["op-max-4"] < 0.2
    assert after["none-off-4"] < 0.2
    assert after["full-off-4"] > 0.8


def test_a_failure_that_was_to_be_expected_blames_nothing():
    """Its memory was in doubt: that explains it."""
    near = PoolItem("near", {"ac": "none", "compile": "off", "batch": "1"}, 1.0, success=0.1)
    doubted = dict(zip(BY_ID, success_chance(CANDIDATES, [Observation(near, None)]), strict=True))
    assert doubted["none-off-2"] > chances(failed("none-off-1"))["none-off-2"] + 0.2


@settings(max_examples=50, deadline=None)
@given(
    fates=st.dictionaries(st.sampled_from(sorted(BY_ID)), st.booleans(), max_size=14),
    order=st.randoms(use_true_random=False),
)
def test_chances_are_chances_whatever_the_order(fates, order):
    observations = [ran(config) if good else failed(config) for config, good in fates.items()]
    chance = success_chance(CANDIDATES, observations)
    assert ((chance >= 0.0) & (chance <= 1.0)).all()
    shuffled = order.sample(observations, len(observations))
    assert success_chance(CANDIDATES, shuffled) == pytest.approx(chance)


@settings(max_examples=50, deadline=None)
@given(config=st.sampled_from(sorted(BY_ID)), others=st.lists(st.sampled_from(sorted(BY_ID)), max_size=4))
def test_one_failure_never_makes_another_candidate_likelier(config, others):
    seen = [ran(other) for other in others if other != config]
    before, after = (success_chance(CANDIDATES, o) for o in (seen, [*seen, failed(config)]))
    assert (after <= before + 1e-12).all()


def test_many_failures_stay_cheap_and_finite():
    """All of a pool but one: every label and pair is suspect."""
    chance = success_chance(CANDIDATES, [ran("full-off-1"), *(failed(c) for c in BY_ID if c != "full-off-1")])
    assert np.isfinite(chance).all()
    assert chance.argmax() == list(BY_ID).index("full-off-1")
