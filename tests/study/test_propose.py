import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.study.propose import (
    SD_CANDIDATE,
    SD_LABEL,
    SD_OFFSET,
    SD_PAIR,
    Observation,
    Pool,
    PoolItem,
    encode,
    expected_improvement,
    failure_weight,
    kernel,
    posterior,
    propose,
)

AXES = {"ac": ("none", "op", "full"), "compile": ("off", "default"), "float8": ("off", "rowwise")}
POOL = [
    PoolItem(f"{ac}-{mode}-{f8}", {"ac": ac, "compile": mode, "float8": f8}, predicted)
    for predicted, (ac, mode, f8) in enumerate(
        ((a, c, f) for a in AXES["ac"] for c in AXES["compile"] for f in AXES["float8"]), start=100
    )
]


def test_first_proposal_is_the_predicted_best():
    assert propose(POOL, []).index == len(POOL) - 1


def test_nothing_left_is_none():
    assert propose(POOL, [], excluded=frozenset(item.config_id for item in POOL)) is None


def test_excluded_candidates_are_never_proposed():
    excluded = frozenset(item.config_id for item in POOL[1:])
    assert propose(POOL, [], excluded=excluded).index == 0


def test_one_probe_teaches_about_every_candidate_with_its_label():
    """Rowwise float8 measured 40 % under its prediction: bf16 candidates move ahead."""
    seen = [
        Observation(POOL[-2].choices, POOL[-2].predicted, POOL[-2].predicted),
        Observation(POOL[-1].choices, POOL[-1].predicted, 0.6 * POOL[-1].predicted),
    ]
    excluded = frozenset({POOL[-1].config_id, POOL[-2].config_id})
    assert POOL[propose(POOL, seen, excluded=excluded).index].choices["float8"] == "off"


def test_failures_of_a_label_make_its_candidates_less_likely():
    axes = list(AXES)
    codes = encode([item.choices for item in POOL], axes)
    seen = encode([item.choices for item in POOL] + [POOL[0].choices, POOL[1].choices], axes)[len(POOL) :]
    success = failure_weight(codes, seen, np.array([True, True]))
    near, far = success[0], success[-1]
    assert near < far <= 1.0


def test_posterior_reproduces_what_was_measured():
    codes = encode([item.choices for item in POOL], list(AXES))
    ratios = np.array([0.2, -0.1])
    mean, sd = posterior(codes, codes[:2], ratios)
    assert mean[:2] == pytest.approx(ratios, abs=0.01)
    assert (sd[:2] < sd[2:].min()).all()


def test_kernel_is_a_covariance():
    codes = encode([item.choices for item in POOL], list(AXES))
    matrix = kernel(codes, codes)
    assert np.allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > 0


@given(mean=st.floats(-2, 2), sd=st.floats(0.01, 1.0), best=st.floats(0.2, 5.0), more=st.floats(0.01, 1.0))
def test_expected_improvement_grows_with_the_mean(mean, sd, best, more):
    low, high = expected_improvement(np.array([mean, mean + more]), np.array([sd, sd]), best)
    assert 0.0 <= low <= high + 1e-12


def test_expected_improvement_matches_sampling():
    rng = np.random.default_rng(0)
    samples = np.exp(rng.normal(0.1, 0.2, 400_000))
    expected = np.maximum(samples - 1.15, 0).mean()
    value = expected_improvement(np.array([0.1]), np.array([0.2]), 1.15)[0]
    assert value == pytest.approx(expected, rel=0.02)


@settings(max_examples=30, deadline=None)
@given(
    effects=st.lists(st.floats(-0.3, 0.3), min_size=7, max_size=7),
    offset=st.floats(-1.0, 1.0),
)
def test_finds_the_best_of_an_additive_truth_in_a_few_probes(effects, offset):
    """Where truth is prediction times label effects, half the pool is enough to come within 3 %."""
    labels = [label for values in AXES.values() for label in values]
    effect = dict(zip(labels, effects, strict=True))

    def truth(item):
        return item.predicted * math.exp(offset + sum(effect[label] for label in item.choices.values()))

    observations, excluded = [], set()
    for _ in range(6):
        item = POOL[propose(POOL, observations, excluded=frozenset(excluded)).index]
        observations.append(Observation(item.choices, item.predicted, truth(item)))
        excluded.add(item.config_id)
    found = max(o.measured for o in observations)
    assert found >= 0.97 * max(map(truth, POOL))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_pool_made_once_proposes_the_same(data):
    """Also with labels that no candidate has, and whatever is excluded."""
    choices = st.fixed_dictionaries(
        {"ac": st.sampled_from(AXES["ac"]), "compile": st.sampled_from(["off", "default", "gone"])},
        optional={"float8": st.sampled_from(["off", "rowwise", "gone"]), "another": st.just("axis")},
    )
    measured = st.none() | st.floats(50.0, 200.0)
    seen = [
        Observation(data.draw(choices), 100.0, data.draw(measured))
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    excluded = frozenset(data.draw(st.sets(st.sampled_from([item.config_id for item in POOL]))))
    proposal = propose(Pool.of(POOL), seen, excluded=excluded)
    assert proposal == propose(POOL, seen, excluded=excluded)
    left = [item for item in POOL if item.config_id not in excluded]
    if proposal is None:
        assert not left
        return
    among = propose(left, seen)
    assert left[among.index] is POOL[proposal.index]
    expected = (proposal.expected, *proposal.interval)
    assert (among.expected, *among.interval) == pytest.approx(expected)


def test_kernel_is_the_sum_that_it_is_said_to_be():
    codes = encode([item.choices for item in POOL], list(AXES))
    for i, j in ((0, 0), (0, 1), (0, len(POOL) - 1), (3, 7)):
        same = [POOL[i].choices[axis] == POOL[j].choices[axis] for axis in AXES]
        pairs = sum(a and b for a, b in combinations(same, 2))
        expected = (
            SD_OFFSET**2 + SD_LABEL**2 * sum(same) / 3 * 3 + SD_PAIR**2 * pairs + SD_CANDIDATE**2 * all(same)
        )
        assert kernel(codes, codes)[i, j] == pytest.approx(expected)
