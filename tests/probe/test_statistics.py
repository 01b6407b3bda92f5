import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.probe import StepRecord
from titan_tune.probe.statistics import is_tight, loss_gap, loss_noise, measured, median_interval

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
