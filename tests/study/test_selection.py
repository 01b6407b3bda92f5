from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeStatus, RankMemory
from titan_tune.errors import InputError
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import (
    final_schedule,
    finalists,
    pareto_front,
    roomier,
    standing_of_trial,
    standings,
    winner,
)


def record(number, config, tps=None, role=Role.PROBE, device=100, status=None, interval=None, retries=0):
    measurement = None
    if tps is not None:
        measurement = Measurement(
            tps,
            interval or (tps * 0.99, tps * 1.01),
            1.0,
            10,
            2,
            False,
            5.0,
            (1.0,),
            (RankMemory(0, device, device, device),),
            retries,
        )
    status = status or (ProbeStatus.COMPLETED if measurement else ProbeStatus.OOM)
    outcome = ProbeOutcome(status, "", 10.0, measurement)
    return TrialRecord(number, config, role, {"a": config}, {}, Path(config), outcome, {})


BASE = record(0, "base", 100.0, Role.BASELINE)


def test_winner_is_the_best_measured_and_gain_is_over_the_baseline():
    best = winner([BASE, record(1, "x", 120.0), record(2, "y", 110.0), record(3, "z")])
    assert best.standing.config_id == "x"
    assert best.gain == pytest.approx(0.2)
    low, high = best.gain_interval
    assert low < best.gain < high


def test_a_lucky_first_run_does_not_win_the_finals():
    records = [
        BASE,
        record(1, "lucky", 130.0),
        record(2, "steady", 120.0),
        record(3, "base", 100.0, Role.FINALIST),
        record(4, "lucky", 112.0, Role.FINALIST),
        record(5, "steady", 119.0, Role.FINALIST),
    ]
    best = winner(records)
    assert best.standing.config_id == "steady"
    assert best.standing.tokens_per_second == 119.0
    assert best.standing.spread == pytest.approx(1 / 119.5)


def test_finals_cut_off_after_the_baseline_decide_nothing():
    records = [BASE, record(1, "x", 120.0), record(2, "base", 99.0, Role.FINALIST)]
    best = winner(records)
    assert best.standing.config_id == "x" and not best.standing.final


def test_finals_interleave_the_baseline_and_resume_where_they_stopped():
    explored = [BASE, *(record(i, f"c{i}", 100.0 + i) for i in range(1, 6))]
    assert finalists(explored, count=3) == ["c5", "c4", "c3"]
    assert final_schedule(explored, count=3, repeats=2) == ["base", "c5", "c4", "c3"] * 2
    begun = [*explored, record(9, "base", 99.0, Role.FINALIST), record(10, "c5", 99.0, Role.FINALIST)]
    assert final_schedule(begun, count=3, repeats=2) == ["c4", "c3", "base", "c5", "c4", "c3"]


def test_a_clear_winner_needs_no_repeat_of_losers():
    explored = [BASE, record(1, "best", 120.0), record(2, "near", 117.0), record(3, "far", 110.0)]
    assert finalists(explored, count=3) == ["best", "near"]
    assert final_schedule(explored, count=3, repeats=1) == ["base", "best", "near"]
    assert final_schedule([BASE, record(1, "x", 120.0), record(2, "y", 110.0)], count=3, repeats=1) == [
        "base",
        "x",
    ]


def test_what_is_too_uncertain_to_tell_goes_to_the_finals():
    best, unsure = record(1, "best", 120.0), record(2, "unsure", 110.0, interval=(100.0, 119.0))
    assert finalists([BASE, best, unsure], count=3) == ["best", "unsure"]
    sure = record(2, "sure", 110.0, interval=(109.0, 111.0))
    assert finalists([BASE, best, sure], count=3) == ["best"]


@given(
    speeds=st.lists(st.floats(50.0, 150.0), min_size=1, max_size=8),
    width=st.floats(0.0, 0.2),
    count=st.integers(1, 4),
)
def test_finalists_are_the_best_in_order_and_always_some(speeds, width, count):
    explored = [
        record(n, f"c{n}", tps, interval=(tps * (1 - width), tps * (1 + width)))
        for n, tps in enumerate(speeds)
    ]
    chosen = finalists(explored, count=count)
    ranked = [s.config_id for s in standings(explored)]
    assert chosen == ranked[: len(chosen)]
    assert 1 <= len(chosen) <= count
    wider = [
        record(n, f"c{n}", tps, interval=(tps * (0.9 - width), tps * (1.1 + width)))
        for n, tps in enumerate(speeds)
    ]
    assert len(finalists(wider, count=count)) >= len(chosen)


def test_a_finalist_that_fails_is_not_run_again():
    records = [BASE, record(1, "x", 120.0), record(2, "x", role=Role.FINALIST, status=ProbeStatus.HANG)]
    assert final_schedule(records, count=1, repeats=1) == ["base"]


def test_cancelled_and_infrastructure_finals_run_again():
    for status in (ProbeStatus.CANCELLED, ProbeStatus.INFRASTRUCTURE):
        records = [BASE, record(1, "x", 120.0), record(2, "x", role=Role.FINALIST, status=status)]
        assert final_schedule(records, count=1, repeats=1) == ["base", "x"]


def test_nothing_measured_has_no_winner():
    assert winner([record(0, "base", role=Role.BASELINE)]) is None
    assert final_schedule([record(0, "base", role=Role.BASELINE)], count=3, repeats=1) == []


def test_the_baseline_can_win():
    best = winner([BASE, record(1, "x", 90.0)])
    assert best.standing.config_id == "base" and best.gain == 0.0


def test_pareto_front_trades_speed_for_memory():
    records = [
        record(0, "fast", 120.0, device=80),
        record(1, "lean", 100.0, device=40),
        record(2, "bad", 99.0, device=60),
    ]
    assert [s.config_id for s in pareto_front(records)] == ["fast", "lean"]


def test_standing_of_trial_names_what_exists():
    with pytest.raises(InputError, match="there is no trial 7; measured trials: 0"):
        standing_of_trial([BASE], 7)
    with pytest.raises(InputError, match="trial 1 measured nothing: oom"):
        standing_of_trial([BASE, record(1, "x")], 1)


def test_standings_are_ordered_and_stable():
    records = [record(0, "b", 100.0), record(1, "a", 100.0), record(2, "c", 101.0)]
    assert [s.config_id for s in standings(records)] == ["c", "a", "b"]


def test_memory_to_spare_is_pointed_at_where_the_winner_had_to_retry():
    tight = record(1, "tight", 200.0, device=139, interval=(190.0, 210.0), retries=1)
    roomy = record(2, "roomy", 195.0, device=100)
    found = roomier([BASE, tight, roomy])
    assert found is not None and found.config_id == "roomy"
    assert winner([BASE, tight, roomy]).standing.config_id == "tight"
    # nothing to point at: no retries, clearly slower, as tight, or retries of its own
    assert roomier([BASE, record(1, "tight", 200.0, device=139, interval=(190.0, 210.0)), roomy]) is None
    assert roomier([BASE, tight, record(2, "slow", 189.0)]) is None
    assert roomier([BASE, tight, record(2, "as tight", 199.0, device=139)]) is None
    assert roomier([BASE, tight, record(2, "retried", 199.0, retries=2)]) is None
    assert roomier([]) is None
