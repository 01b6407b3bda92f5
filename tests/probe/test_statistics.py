import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.probe import StepRecord
from titan_tune.probe.statistics import (
    MINIMUM_TO_JUDGE,
    NOISE_BOUND,
    cannot_win,
    is_tight,
    jitter,
    loss_gap,
    loss_noise,
    measured,
    median_interval,
)

rates = st.lists(st.floats(min_value=1e-3, max_value=1e9), min_size=1, max_size=40)


def record(step, seconds=1.0):
    return StepRecord(step, 1.0, 1.0, seconds, 1.0, 1, 1, 1, 0, 0, 0.0)


@given(rates)
def test_interval_holds_the_median_and_lies_within_the_values(values):
    median, low, high = median_interval(values, resamples=50)
    assert min(values) <= low <= median <= high <= max(values)


@given(rates)
def test_interval_is_deterministic(values):
    assert median_interval(values, resamples=50) == median_interval(values, resamples=50)


@given(rates, st.floats(min_value=0.1, max_value=10))
def test_interval_scales_with_its_values(values, factor):
    plain = median_interval(values, resamples=50)
    scaled = median_interval([value * factor for value in values], resamples=50)
    assert scaled == pytest.approx([factor * x for x in plain])


def test_interval_narrows_with_more_of_the_same_noise():
    few = [100.0, 101.0, 99.0, 102.0, 98.0]
    _, low_few, high_few = median_interval(few)
    _, low_many, high_many = median_interval(few * 20)
    assert high_many - low_many < high_few - low_few


def test_one_outlier_does_not_move_the_median():
    steady = [100.0 + i % 3 for i in range(20)]
    assert median_interval([*steady, 1.0])[0] == pytest.approx(median_interval(steady)[0], abs=1.0)


def test_no_values_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_measured_drops_the_warmup_steps():
    records = [record(step) for step in range(1, 11)]
    assert [r.step for r in measured(records, 3)] == [4, 5, 6, 7, 8, 9, 10]
    assert measured(records, 10) == ()


def test_tight_needs_enough_values_and_a_narrow_interval():
    assert is_tight([100.0] * 8, minimum=8, target_relative_interval=0.01)
    assert not is_tight([100.0] * 7, minimum=8, target_relative_interval=0.01)
    assert not is_tight([100.0, 130.0] * 4, minimum=8, target_relative_interval=0.01)


def test_noise_is_blind_to_a_straight_trend():
    falling = [10.0 - 0.1 * i for i in range(20)]
    assert loss_noise(falling) == pytest.approx(0.0, abs=1e-9)
    assert loss_noise([x + (0.5 if i % 2 else -0.5) for i, x in enumerate(falling)]) > 0.4
    assert loss_noise([1.0, 2.0]) == 0.0


def test_gap_is_that_of_the_last_common_steps():
    baseline = [5.0] * 10
    assert loss_gap([9.0] * 5 + [5.5] * 5, baseline) == pytest.approx(0.5)
    assert loss_gap([5.5] * 3, baseline) == pytest.approx(0.5)
    assert loss_gap([], baseline) == 0.0
    assert math.isfinite(loss_gap([1.0] * 20, baseline))


noise = st.lists(st.floats(min_value=-NOISE_BOUND, max_value=0.5), min_size=1, max_size=30)


@given(st.floats(min_value=1.0, max_value=1e9), st.floats(min_value=1.0, max_value=3.0), noise)
def test_a_probe_that_would_win_is_never_given_up_for_noise_within_the_bound(beat, advantage, noise):
    true_median = beat * advantage
    assert not cannot_win([true_median * (1 + x) for x in noise], beat)


@given(noise, st.floats(min_value=1.0, max_value=1e9))
def test_one_step_that_is_fast_enough_keeps_a_probe(noise, beat):
    slow = [0.1 * beat * (1 + x) for x in noise]
    assert not cannot_win([*slow, beat], beat)


@pytest.mark.parametrize(
    ("rates", "beat", "given_up"),
    [
        ([50.0] * MINIMUM_TO_JUDGE, 100.0, True),
        ([50.0] * (MINIMUM_TO_JUDGE - 1), 100.0, False),
        ([96.0] * 20, 100.0, False),
        ([94.0] * 20, 100.0, True),
        ([50.0] * 20, None, False),
        ([], 100.0, False),
    ],
)
def test_when_a_probe_is_given_up(rates, beat, given_up):
    assert cannot_win(rates, beat) is given_up


def test_jitter_is_the_spread_of_most_values_over_the_median():
    assert jitter([1.0, 1.0, 1.0]) is None
    assert jitter([2.0] * 10) == 0.0
    assert jitter([float(x) for x in range(1, 12)]) == pytest.approx((10 - 2) / 6)


@given(rates.filter(lambda values: len(values) >= 4), st.floats(min_value=0.1, max_value=10))
def test_jitter_has_no_unit(values, factor):
    assert jitter([factor * value for value in values]) == pytest.approx(jitter(values))
