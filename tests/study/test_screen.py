from dataclasses import replace
from pathlib import Path

import pytest
import scripted_search as scripted

from titan_tune.domain.probe import ProbeOutcome, ProbeSpec, ProbeStatus
from titan_tune.study.plan import SCREEN_RULE
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.screen import SCREENED, screen_name, screen_plan, screened


@pytest.fixture
def plan(tmp_path):
    return scripted.scripted_plan(20, tmp_path)


def record(number, item, outcome):
    return TrialRecord(
        number, item.candidate.config_id, Role.PROBE, item.candidate.choices, {}, Path("x"), outcome, {}
    )


def measured(plan, item, speed):
    spec = ProbeSpec(item.candidate.config_id, Path("x"), "", 1, "cpu", plan.space.probe, Path("c"), 1.0)
    outcome = scripted.outcome_of(spec)
    return replace(outcome, measurement=replace(outcome.measurement, tokens_per_second_per_gpu=speed))


def ids(plan):
    return [item.candidate.config_id for item in plan.pool]


def test_the_first_search_has_no_finals_and_a_budget_of_its_own(plan):
    space = screen_plan(plan).space
    assert space.budget.max_probes == SCREENED and space.budget.max_gpu_hours is None
    assert space.probe.finalists == 0 and screen_name("s") == "s.dry-run"
    assert ids(screen_plan(plan)) == ids(plan)


def test_what_dry_runs_found_orders_the_candidates_and_scales_the_rest(plan):
    predicted = {item.candidate.config_id: item.predicted_tokens_per_second for item in plan.pool}
    third, ninth, last = plan.pool[3], plan.pool[9], plan.pool[-1]
    records = [
        record(0, third, measured(plan, third, 2.0 * third.predicted_tokens_per_second)),
        record(1, ninth, measured(plan, ninth, 2.2 * ninth.predicted_tokens_per_second)),
        record(2, last, measured(plan, last, 1.0 * last.predicted_tokens_per_second)),
    ]
    better = screened(plan, records)
    now = {item.candidate.config_id: item.predicted_tokens_per_second for item in better.pool}
    assert now.keys() == predicted.keys() and better.rejected == plan.rejected
    ratios = {config: now[config] / predicted[config] for config in now}
    assert [ratios.pop(item.candidate.config_id) for item in (third, ninth, last)] == pytest.approx(
        [2.0, 2.2, 1.0]
    )
    assert list(ratios.values()) == pytest.approx([2.0] * len(ratios))
    assert ids(better) == sorted(now, key=lambda config: (-now[config], config))
    assert (
        better.by_id[third.candidate.config_id].predicted_tokens_per_second == now[third.candidate.config_id]
    )
    assert better.labels() == plan.labels()


def test_who_fails_in_a_dry_run_is_left_out_unless_it_is_the_users_job_or_the_machine_failed(plan):
    first, second, third = plan.pool[:3]
    records = [
        record(0, first, ProbeOutcome(ProbeStatus.OOM, "needs 90 GiB, target has 80", 5.0)),
        record(1, second, ProbeOutcome(ProbeStatus.INFRASTRUCTURE, "the fake backend cannot run this", 5.0)),
        record(2, third, ProbeOutcome(ProbeStatus.CANCELLED, "", 5.0)),
        record(3, plan.baseline, ProbeOutcome(ProbeStatus.UNSUPPORTED, "no", 5.0)),
    ]
    better = screened(plan, records)
    assert set(ids(plan)) - set(ids(better)) == {first.candidate.config_id}
    assert better.rejected[SCREEN_RULE] == 1
    assert better.examples[SCREEN_RULE].message == "oom: needs 90 GiB, target has 80"
    assert better.baseline is not None and first.candidate.config_id not in better.by_id


def test_no_dry_run_changes_nothing(plan):
    assert screened(plan, []) == plan
