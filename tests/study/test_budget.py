import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.probe import ProbeSettings
from titan_tune.space.axes import Budget
from titan_tune.study.budget import Spent, exhausted, final_runs, remaining_seconds

SETTINGS = ProbeSettings()


@pytest.mark.parametrize(
    ("max_probes", "pool_size", "measured", "runs"),
    [
        (None, 30, None, 4),
        (None, 30, 1, 3),
        (None, 2, None, 3),
        (None, 1, None, 0),
        (20, 30, 9, 4),
        (6, 30, 5, 3),
    ],
)
def test_the_finals_keep_a_run_for_each_finalist_and_the_baseline(max_probes, pool_size, measured, runs):
    assert final_runs(Budget(max_probes=max_probes), SETTINGS, pool_size=pool_size, measured=measured) == runs


@given(st.integers(1, 60), st.integers(1, 100), st.integers(0, 100))
def test_the_finals_never_take_more_than_half_and_never_run_the_baseline_alone(probes, pool, measured):
    runs = final_runs(Budget(max_probes=probes), SETTINGS, pool_size=pool, measured=measured)
    assert runs != 1 and runs <= probes // 2


def test_each_limit_says_which_it_is():
    def why(spent, **limits):
        return exhausted(Budget(**limits), spent, world_size=8, next_seconds=60.0, reserved_runs=1)

    assert why(Spent(3, 0.0, 0.0), max_probes=4) == "budget of 4 probes"
    assert why(Spent(2, 0.0, 0.0), max_probes=4) is None
    assert why(Spent(0, 3000.0, 0.0), max_gpu_hours=1.0) == "budget of 1 GPU-hours"
    assert why(Spent(0, 2600.0, 0.0), max_gpu_hours=1.0) is None
    assert why(Spent(0, 0.0, 1700.0), max_wall_clock_hours=0.5) == "budget of 0.5 hours of wall clock"


def test_what_is_left_bounds_one_probe():
    budget = Budget(max_gpu_hours=1.0, max_wall_clock_hours=2.0)
    assert remaining_seconds(budget, Spent(1, 1600.0, 100.0), world_size=8) == 250.0
    assert remaining_seconds(budget, Spent(1, 9999.0, 100.0), world_size=8) == 0.0
    assert remaining_seconds(Budget(), Spent(1, 1.0, 1.0), world_size=8) is None
