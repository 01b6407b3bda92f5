import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.study.correction import (
    DURATION,
    SPEED,
    Posterior,
    Prior,
    Seen,
    averaged,
    posterior,
    posterior_mean,
)
from titan_tune.study.pool import (
    SD_CANDIDATE,
    SD_LABEL,
    SD_PAIR,
    Observation,
    Pool,
    PoolItem,
    effects_variance,
)
from titan_tune.study.propose import SURPRISE_CHANCE, expected_improvement, outlook, propose
from titan_tune.study.similarity import label_similarity

AXES = {
    "ac": ("none", "selective-op", "full"), "compile": ("off", "default"), "float8": ("off", "rowwise"),
}  # fmt: skip
POOL = [
    PoolItem(f"{ac}-{mode}-{f8}", {"ac": ac, "compile": mode, "float8": f8}, predicted)
    for predicted, (ac, mode, f8) in enumerate(itertools.product(*AXES.values()), start=100)
]
IDS = [item.config_id for item in POOL]
MEASURED = st.none() | st.floats(50.0, 200.0)
SECONDS = st.none() | st.floats(5.0, 500.0)
OBSERVATIONS = st.lists(st.builds(Observation, st.sampled_from(POOL), MEASURED, SECONDS), max_size=6)
SOME_IDS = st.sets(st.sampled_from(IDS)).map(frozenset)


def observe(item, ratio=1.0, **more):
    return Observation(item, ratio * item.predicted, **more)


def chosen(pool, observations, **more):
    """The candidate proposed, or None."""
    proposal = propose(pool, observations, **more)
    return None if proposal is None else pool[proposal.index]


# ---- what is proposed


def test_first_proposal_is_the_predicted_best():
    assert propose(POOL, []).index == len(POOL) - 1
    assert propose(POOL, []).expected_gain == math.inf


def test_nothing_left_is_none():
    assert propose(POOL, [], excluded=frozenset(IDS)) is None
    assert propose(POOL, [], excluded=frozenset(IDS[1:]), pending=POOL[:1]) is None


def test_one_probe_teaches_about_every_candidate_with_its_label():
    """Rowwise float8 measured 40 % under its prediction: bf16 candidates move ahead."""
    seen = [observe(POOL[-2]), observe(POOL[-1], 0.6)]
    item = chosen(POOL, seen, excluded=frozenset(IDS[-2:]))
    assert item.choices["float8"] == "off"


def test_a_cheap_probe_goes_before_a_dear_one_of_about_the_same_gain():
    pool = [replace(item, predicted=100.0 + 0.1 * place) for place, item in enumerate(POOL)]
    dear = [replace(item, seconds=300.0 if item.choices["ac"] == "full" else 60.0) for item in pool]
    seen = [observe(pool[0])]
    excluded = frozenset(IDS[:1])
    assert chosen(pool, seen, excluded=excluded).choices["ac"] == "full"
    assert chosen(dear, seen, excluded=excluded).choices["ac"] != "full"


def test_durations_are_learned_by_label():
    """A compiled probe took ten times as long as guessed: so will the others."""
    seen = [observe(POOL[0], seconds=60.0), observe(POOL[2], seconds=600.0)]
    seconds = outlook(Pool.of(POOL), seen).seconds
    compiled = np.array([item.choices["compile"] == "default" for item in POOL])
    assert seconds[compiled].min() > 1.5 * seconds[~compiled].max()


def test_a_cheap_probe_of_little_use_does_not_go_first():
    pool = [
        PoolItem("known", {"a": "1"}, 100.0),
        PoolItem("good", {"a": "2"}, 130.0, seconds=1000.0),
        PoolItem("poor", {"a": "3"}, 60.0, seconds=1.0),
    ]
    assert chosen(pool, [observe(pool[0])], excluded=frozenset({"known"})).config_id == "good"


def test_the_gain_is_over_what_noisy_probes_say_together():
    """A lucky, uncertain probe is not taken at its word."""
    certain = outlook(Pool.of(POOL), [observe(POOL[0], 1.2), *map(observe, POOL[1:6])]).best
    doubtful = outlook(Pool.of(POOL), [observe(POOL[0], 1.2, noise=0.2), *map(observe, POOL[1:6])]).best
    assert doubtful < certain <= 1.2 * POOL[0].predicted


@settings(deadline=None)
@given(observations=OBSERVATIONS, excluded=SOME_IDS, flying=st.lists(st.sampled_from(POOL), max_size=4))
def test_neither_excluded_nor_flying_candidates_are_proposed(observations, excluded, flying):
    item = chosen(POOL, observations, excluded=excluded, pending=flying)
    left = set(IDS) - excluded - {f.config_id for f in flying}
    assert (item.config_id in left) if left else item is None


@settings(deadline=None)
@given(observations=OBSERVATIONS)
def test_probes_side_by_side_never_run_the_same(observations):
    flying = []
    while (item := chosen(POOL, observations, pending=flying)) is not None:
        flying.append(item)
    assert sorted(item.config_id for item in flying) == sorted(IDS)


def test_a_probe_in_flight_sends_the_next_one_elsewhere():
    """Without it, both would look at what is expected to be best; with it, that much is taken as known."""
    pool = [replace(item, predicted=100.0 + 0.01 * place) for place, item in enumerate(POOL)]
    seen = [observe(pool[0])]
    first = chosen(pool, seen, excluded=frozenset(IDS[:1]))
    alone = outlook(Pool.of(pool), seen).sd
    beside = outlook(Pool.of(pool), seen, pending=[first]).sd
    shared = [
        sum(a == b for a, b in zip(i.choices.values(), first.choices.values(), strict=True)) for i in pool
    ]
    near = np.array(shared) == 2
    assert (beside[near] < alone[near]).all()
    assert chosen(pool, seen, excluded=frozenset(IDS[:1]), pending=[first]).config_id != first.config_id


@settings(deadline=None)
@given(observations=OBSERVATIONS, excluded=SOME_IDS, order=st.permutations(range(len(POOL))))
def test_the_order_of_the_pool_and_of_the_probes_does_not_matter(observations, excluded, order):
    item = chosen(POOL, observations, excluded=excluded)
    shuffled = [POOL[place] for place in order]
    again = random.Random(0).sample(observations, len(observations))
    assert chosen(shuffled, again, excluded=excluded) == item


@settings(deadline=None)
@given(observations=OBSERVATIONS, chance=st.floats(0.05, 0.95), more=st.floats(0.0, 1.0))
def test_a_better_chance_to_run_never_makes_a_candidate_less_wanted(observations, chance, more):
    first = chosen(POOL, observations)
    place = POOL.index(first)
    doubtful = [*POOL[:place], replace(first, success=chance), *POOL[place + 1 :]]
    if propose(doubtful, observations).index != place:
        return
    surer = replace(first, success=chance + more * (1.0 - chance))
    assert propose([*POOL[:place], surer, *POOL[place + 1 :]], observations).index == place


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_pool_made_once_proposes_the_same(data):
    """Also with labels that no candidate has, and whatever is excluded."""
    choices = st.fixed_dictionaries(
        {"ac": st.sampled_from(AXES["ac"]), "compile": st.sampled_from(["off", "default", "gone"])},
        optional={"float8": st.sampled_from(["off", "rowwise", "gone"]), "another": st.just("axis")},
    )
    seen = [
        Observation(PoolItem("x", data.draw(choices), 100.0), data.draw(MEASURED))
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    excluded = data.draw(SOME_IDS)
    pool = Pool.of(POOL)
    propose(pool, seen[:1])
    proposal = propose(pool, seen, excluded=excluded)
    assert proposal == propose(POOL, seen, excluded=excluded)
    left = [item for item in POOL if item.config_id not in excluded]
    if proposal is None:
        assert not left
        return
    among = propose(left, seen)
    assert left[among.index] is POOL[proposal.index]
    expected = (proposal.expected, *proposal.interval)
    assert (among.expected, *among.interval) == pytest.approx(expected)


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
        item = chosen(POOL, observations, excluded=frozenset(excluded))
        observations.append(Observation(item, truth(item)))
        excluded.add(item.config_id)
    assert max(o.measured for o in observations) >= 0.97 * max(map(truth, POOL))


def test_a_search_without_predictions_learns_the_scale_and_the_labels():
    """Models that no formula covers: every candidate is predicted at 1 token/s."""
    effect = {"none": 0.2, "selective-op": 0.1, "full": 0.0, "off": 0.0, "default": 0.25, "rowwise": 0.15}
    pool = [replace(item, predicted=1.0) for item in POOL]

    def truth(item):
        return 50_000.0 * math.exp(sum(effect[label] for label in item.choices.values()))

    observations, excluded = [observe(pool[0], truth(pool[0]))], {pool[0].config_id}
    while len(observations) < 6:
        proposal = propose(pool, observations, excluded=frozenset(excluded))
        item = pool[proposal.index]
        assert proposal.expected_gain > 0.001 or max(o.measured for o in observations) == max(
            map(truth, pool)
        )
        assert proposal.expected == pytest.approx(truth(item), rel=0.5)
        observations.append(Observation(item, truth(item)))
        excluded.add(item.config_id)
    assert max(o.measured for o in observations) == max(map(truth, pool))


# ---- what it is made of


def test_failures_of_a_label_make_its_candidates_less_likely():
    success = outlook(Pool.of(POOL), [Observation(POOL[0], None), Observation(POOL[1], None)]).success
    near, far = success[0], success[-1]
    assert near < far <= 1.0


def test_a_label_never_tried_may_surprise():
    """The model was right about four probes, all without rowwise: that leaves more doubt about rowwise."""
    pool = Pool.of(POOL)
    off = [item for item in POOL if item.choices["float8"] == "off"]
    after = outlook(pool, [observe(item) for item in off[:4]])
    rowwise = np.array([item.choices["float8"] == "rowwise" for item in POOL])
    tried = np.array([item in off[:4] for item in POOL])
    assert after.surprise[rowwise].min() > after.surprise[~rowwise].max()
    assert (after.surprise[tried] == 0.0).all()
    one_unseen = [after.surprise[POOL.index(item)] for item in POOL if item.choices["float8"] == "rowwise"]
    assert min(one_unseen) == pytest.approx(SURPRISE_CHANCE)


def test_a_surprise_is_what_keeps_a_search_going():
    """A label predicted 10 % slower, after many probes that the model was right about."""
    pool = [replace(item, predicted=100.0 if item.choices["float8"] == "off" else 90.0) for item in POOL]
    seen = [observe(item) for item in pool if item.choices["float8"] == "off"]
    tried = frozenset(o.item.config_id for o in seen)
    known = [*seen, observe(pool[-1])]
    unknown = propose(pool, seen, excluded=tried)
    assert unknown.expected_gain > 0.001
    assert pool[unknown.index].choices["float8"] == "rowwise"
    assert propose(pool, known, excluded=tried | {pool[-1].config_id}).expected_gain < 0.001


def test_gains_need_something_to_gain_over():
    with pytest.raises(ValueError, match="nothing yet to gain over"):
        outlook(Pool.of(POOL), []).gains()


def test_the_outlook_reproduces_what_was_measured():
    seen = [observe(POOL[0], 1.2), observe(POOL[1], 0.9)]
    after = outlook(Pool.of(POOL), seen)
    assert np.exp(after.log_mean[:2]) == pytest.approx([o.measured for o in seen], rel=0.02)
    assert (after.sd[:2] < after.sd[2:].min()).all()


def test_a_noisy_probe_is_believed_less():
    sure, unsure = (
        outlook(Pool.of(POOL), [observe(POOL[0]), observe(POOL[1], 1.3, noise=noise)]) for noise in (0.0, 0.3)
    )
    assert unsure.log_mean[1] < sure.log_mean[1]
    assert unsure.sd[1] > sure.sd[1]


def test_effects_are_the_sum_that_they_are_said_to_be():
    pool = Pool.of(POOL)
    for i, j in ((0, 0), (0, 1), (0, len(POOL) - 1), (3, 7)):
        alike = [label_similarity(POOL[i].choices[axis], POOL[j].choices[axis]) for axis in AXES]
        pairs = sum(a * b for a, b in itertools.combinations(alike, 2))
        expected = SD_LABEL**2 * sum(alike) + SD_PAIR**2 * pairs + SD_CANDIDATE**2 * (i == j)
        assert pool.common(POOL[j]).effects[i] == pytest.approx(expected)
    assert effects_variance(len(AXES)) == pytest.approx(pool.common(POOL[0]).effects[0])


def test_effects_are_a_covariance():
    pool = Pool.of(POOL)
    matrix = np.array([pool.common(item).effects for item in POOL])
    assert np.allclose(matrix, matrix.T)
    assert np.linalg.eigvalsh(matrix).min() > 0


def test_a_pool_without_axes_has_one_kind_of_candidate():
    alone = PoolItem("only", {}, 10.0)
    assert propose([alone], []).index == 0
    assert propose([alone], [observe(alone, 2.0)]).expected == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("prior", [*SPEED, DURATION])
def test_the_posterior_is_that_of_the_textbook(prior):
    pool, seen_items = Pool.of(POOL), [POOL[0], POOL[5], POOL[7]]
    cross = np.array([pool.common(item).effects for item in seen_items])
    among, ratios, noise = cross[:, [0, 5, 7]], np.array([0.2, -0.1, 0.05]), np.array([0.0, 0.02, 0.1])
    found = posterior(cross, effects_variance(3), Seen(among, ratios, noise), prior)
    covariance = prior.offset**2 + prior.scale**2 * among + np.diag(noise**2 + prior.noise**2)
    to_seen = prior.offset**2 + prior.scale**2 * cross.T
    own = prior.offset**2 + prior.scale**2 * effects_variance(3)
    assert found.mean == pytest.approx(to_seen @ np.linalg.solve(covariance, ratios))
    left = own - np.einsum("ij,ji->i", to_seen, np.linalg.solve(covariance, to_seen.T))
    assert found.sd**2 == pytest.approx(left)
    likelihood = -0.5 * (ratios @ np.linalg.solve(covariance, ratios) + np.linalg.slogdet(covariance)[1])
    assert found.log_likelihood == pytest.approx(likelihood)
    assert posterior_mean(cross, Seen(among, ratios, noise), prior) == pytest.approx(found.mean)


def test_a_mixture_has_its_parts_mean_and_variance():
    parts = [
        Posterior(np.array([0.0]), np.array([1.0]), 0.0),
        Posterior(np.array([3.0]), np.array([2.0]), 1.0),
    ]
    mixture = averaged(parts)
    weight = math.e / (1 + math.e)
    assert mixture.mean[0] == pytest.approx(3 * weight)
    assert mixture.sd[0] ** 2 == pytest.approx((1 - weight) + weight * (4 + 9) - (3 * weight) ** 2)
    assert averaged(parts[:1]).sd[0] == 1.0


def test_regular_probes_make_the_model_look_better():
    """Ten probes that one offset explains leave less doubt about the rest than ten that scatter."""
    rng = random.Random(0)
    regular = [observe(item, 0.8) for item in POOL[:10]]
    scattered = [observe(item, 0.8 * math.exp(rng.gauss(0.0, 0.1))) for item in POOL[:10]]
    assert outlook(Pool.of(POOL), regular).sd[-1] < outlook(Pool.of(POOL), scattered).sd[-1]


def test_a_prior_says_what_a_lone_candidate_is_worth():
    prior = Prior(offset=0.3, scale=1.0, noise=0.01)
    nothing = Seen(np.zeros((0, 0)), np.zeros(0), np.zeros(0))
    assert posterior(np.zeros((0, 2)), 0.04, nothing, prior).sd == pytest.approx([math.sqrt(0.13)] * 2)
    assert (posterior_mean(np.zeros((0, 2)), nothing, prior) == 0.0).all()


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


def test_nothing_is_gained_far_below_the_best():
    value = expected_improvement(np.array([0.0, 0.0]), np.array([0.01, 1.0]), 2.0)
    assert value[0] == 0.0 < value[1]
