import math
from dataclasses import asdict, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.report.studies import AXES, BASE, CPU, choices, full_study, info, record, report
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeStatus
from titan_tune.report import notes, words
from titan_tune.report.analysis import only_difference
from titan_tune.report.answer import break_even_hours
from titan_tune.report.charts import Scale
from titan_tune.study.records import Role

BEST = choices("none", "default", "rowwise", "2")
OTHER = choices("none", "default", "off", "2")
POSITIVE = st.floats(1e-3, 1e6)


@given(gpu_hours=POSITIVE, world_size=st.integers(1, 4096), gain=st.floats(1e-4, 10.0))
def test_at_the_break_even_the_hours_saved_are_the_hours_spent(gpu_hours, world_size, gain):
    hours = break_even_hours(gpu_hours, world_size=world_size, gain=gain)
    saved = (hours - hours / (1.0 + gain)) * world_size
    assert saved == pytest.approx(gpu_hours, rel=1e-6)


def test_a_layout_that_trains_otherwise_changes_numerics_without_a_key_that_says_so():
    study, records = full_study()
    tp = {"parallelism.data_parallel_shard_degree": 1, "parallelism.tensor_parallel_degree": 8}
    best = report(study, records).answer.config_id
    data = report(study, [replace(r, values=tp) if r.config_id == best else r for r in records])
    assert data.answer.changes_numerics
    assert any("trains in fp32" in line for line in data.answer.layout_effects)
    assert "trains in fp32" in words.numerics_sentence(data.answer)
    assert [c.changes_numerics for c in data.configurations if c.is_best] == [True]


@given(gain=st.floats(-0.9, 0.0))
def test_a_search_without_a_gain_never_pays(gain):
    assert break_even_hours(1.0, world_size=8, gain=gain) == math.inf


def test_the_answer_states_the_finals_against_the_baseline_of_the_finals():
    data = report(*full_study())
    found = data.answer
    assert dict(found.choices) == BEST
    assert found.gain == pytest.approx(8350.0 / 6405.0 - 1.0)
    assert found.gain_interval[0] < found.gain < found.gain_interval[1]
    assert (found.runs, found.counted_runs, found.final) == (2, 1, True)
    assert [(c.name, c.before, c.after) for c in found.numerics] == [("float8", "off", "rowwise")]
    assert [(c.name, c.before, c.after) for c in found.keys] == [
        ("activation_checkpoint.mode", "selective", "none"),
        ("compile.enable", "false", "true"),
        ("model.converters", "[]", '["quantize.linear.float8"]'),
    ]


def test_price_counts_every_gpu_for_every_second_of_every_probe():
    study, records = full_study()
    price = report(study, records).price
    assert price.gpu_hours == pytest.approx(8 * sum(r.outcome.seconds for r in records) / 3600)
    assert (price.probes, price.measured) == (len(records), sum(r.measurement is not None for r in records))
    assert dict(price.statuses) == {"completed": price.measured, "oom": 3, "hang": 1}
    even = price.break_even
    assert even.earliest_hours < even.hours < even.latest_hours


def test_break_even_has_no_latest_hour_when_the_gain_may_be_nothing():
    records = [record(0, BASE, 100.0, role=Role.BASELINE), record(1, OTHER, 100.5)]
    data = report(info(), records)
    assert data.price.break_even.latest_hours is None
    assert not data.answer.gain_is_certain
    assert "and never over" in words.break_even_sentence(data)
    assert "cannot be told apart" in words.headline(data)


def test_the_baseline_as_winner_has_no_break_even():
    data = report(info(), [record(0, BASE, 100.0, role=Role.BASELINE), record(1, OTHER, 90.0)])
    assert data.answer.is_baseline and data.price.break_even is None
    assert words.headline(data).startswith("Nothing that was measured beats the job as it was")
    assert data.answer.numerics == ()


def test_a_finalist_slower_than_the_job_as_it_was_is_not_called_a_gain():
    records = [record(0, BASE, 100.0, role=Role.BASELINE), record(1, OTHER, 104.0),
               record(2, BASE, role=Role.FINALIST, status=ProbeStatus.HANG),
               record(3, OTHER, 95.0, role=Role.FINALIST)]  # fmt: skip
    data = report(info(), records)
    assert data.answer.gain < 0 and data.price.break_even is None
    assert words.headline(data).endswith("keep the job.")


def test_without_a_measured_baseline_numerics_are_told_from_its_choices_and_no_gain_is_stated():
    records = [record(0, BASE, role=Role.BASELINE, message="asked for 9 GiB"), record(1, BEST, 100.0)]
    data = report(info(), records)
    assert data.answer.gain is None and data.price.break_even is None
    assert [c.before for c in data.answer.numerics] == ["off"]
    assert words.gain_sentence(data, data.answer).endswith("(it ended as oom: asked for 9 GiB).")
    assert not any(c.is_baseline for c in data.configurations)


def test_configurations_are_ordered_by_throughput_even_where_the_finals_chose_another():
    records = [record(0, BASE, 100.0, role=Role.BASELINE), record(1, BEST, 130.0), record(2, OTHER, 120.0),
               record(3, BASE, 100.0, role=Role.FINALIST), record(4, OTHER, 119.0, role=Role.FINALIST)]  # fmt: skip
    data = report(info(), records)
    assert [c.is_best for c in data.configurations] == [False, True, False]
    assert [c.is_baseline for c in data.configurations] == [False, False, True]
    assert words.order_note(data)


def test_best_so_far_never_falls_and_ignores_the_finals():
    study, records = full_study()
    data = report(study, records)
    best = [s.best_so_far for s in data.steps]
    assert best == sorted(best)
    explored = [r.tokens_per_second for r in records if r.measurement and r.role is not Role.FINALIST]
    assert best[-1] == max(explored)
    minutes = [s.gpu_minutes for s in data.steps]
    assert minutes == sorted(minutes)
    assert minutes[-1] / 60 == pytest.approx(data.price.gpu_hours)


def test_predictions_are_compared_per_configuration():
    records = [record(0, BASE, 100.0, role=Role.BASELINE, predicted=110.0, active_gib=50.0,
                      predicted_active_gib=49.0),
               record(1, OTHER, 120.0, predicted=120.0, active_gib=60.0, predicted_active_gib=66.0),
               record(2, BEST, 150.0)]  # fmt: skip
    data = report(info(), records)
    assert len(data.throughput.points) == 2
    assert data.throughput.median_error == pytest.approx(0.05)
    assert data.throughput.median_ratio == pytest.approx((1.0 + 100 / 110) / 2)
    assert data.memory.median_error == pytest.approx((0.02 + 0.1) / 2)


def test_resident_set_sizes_are_not_compared_with_the_formula():
    study = info(cluster=ClusterSpec(gpu=CPU, gpus_per_node=2), device="cpu")
    rss = record(0, BASE, 100.0, role=Role.BASELINE, predicted_active_gib=1.0, memory_kind="rss")
    data = report(study, [rss])
    assert data.memory.points == () and data.worker == "process"
    assert "CPU processes" in words.error_sentence(data, memory=True)
    assert notes.CPU_NOTE in notes.limits(data)
    assert "2 processes" in words.price_sentence(data)


def test_an_effect_is_the_median_over_pairs_that_differ_in_one_axis_only():
    records = [
        record(0, BASE, 100.0, role=Role.BASELINE, active_gib=60.0),
        record(1, BASE | {"compile": "default"}, 110.0, active_gib=50.0),
        record(2, BASE | {"local_batch_size": "4"}, 200.0, active_gib=100.0),
        record(3, BASE | {"local_batch_size": "4", "compile": "default"}, 240.0, active_gib=96.0),
        record(4, BASE | {"activation_checkpoint": "full", "float8": "rowwise"}, 50.0),
    ]
    effects = {(e.axis, e.before, e.after): e for e in report(info(), records).effects}
    assert set(effects) == {("compile", "off", "default"), ("local_batch_size", "2", "4")}
    effect = effects["compile", "off", "default"]
    assert effect.pairs == 2
    assert effect.median_ratio == pytest.approx((1.1 + 1.2) / 2)
    assert (effect.lowest_ratio, effect.highest_ratio) == (pytest.approx(1.1), pytest.approx(1.2))
    assert effect.median_memory_gib == pytest.approx(-7.0, abs=1e-6)


def test_effects_start_at_the_label_of_the_job_as_it_was():
    base = BASE | {"activation_checkpoint": "full"}
    records = [
        record(0, base, 100.0, role=Role.BASELINE),
        record(1, base | {"activation_checkpoint": "none"}, 120.0),
        record(2, base | {"activation_checkpoint": "selective op"}, 110.0),
    ]
    steps = [(e.before, e.after) for e in report(info(), records).effects]
    assert steps == [("full", "selective op"), ("full", "none"), ("selective op", "none")]


labels = st.fixed_dictionaries({axis: st.sampled_from(values) for axis, values in AXES.items()})


@given(one=labels, other=labels)
def test_only_difference_is_symmetric_and_exact(one, other):
    axis = only_difference(one, other)
    assert axis == only_difference(other, one)
    assert (axis is not None) == (sum(one[a] != other[a] for a in one) == 1)


def test_choices_that_never_differ_are_said_once():
    records = [record(0, BASE, 100.0, role=Role.BASELINE), record(1, BASE | {"compile": "default"}, 110.0)]
    data = report(info(), records)
    assert [c.label for c in data.configurations] == ["compile=default", "compile=off"]
    assert dict(data.common) == {a: v for a, v in BASE.items() if a != "compile"}


def test_coverage_adds_up_and_an_outside_baseline_is_not_a_candidate():
    base = dict.fromkeys(AXES, "base")
    records = [record(0, base, 100.0, role=Role.BASELINE), record(1, OTHER, 110.0), record(2, BEST)]
    coverage = report(info(), records).coverage
    assert coverage.total == (
        sum(r.count for r in coverage.rejected) + coverage.duplicates + coverage.candidates
    )
    assert (coverage.tried, coverage.untried, coverage.measured) == (2, 22, 2)
    assert coverage.out_of_memory == 1
    assert [r.rule for r in coverage.rejected] == ["does-not-fit", "float8-needs-compile"]


def test_a_study_from_before_examples_were_kept_still_reports():
    assert all(r.example == "" for r in report(info(rejection_examples={}), []).coverage.rejected)


def test_spread_of_repeated_runs_is_reported():
    data = report(*full_study())
    assert len(data.repeated) == 3
    assert any(text.startswith("Repeatability: 3 configurations") for text in notes.limits(data))
    alone = report(info(), [record(0, BASE, 1.0)])
    assert notes.limits(alone)[0].startswith("Repeatability is not known")


def test_losses_that_are_not_finite_are_left_out():
    data = report(info(), [record(0, BASE, 100.0, losses=(3.0, 2.5, math.inf))])
    assert data.trials[0].final_loss == 2.5


def test_the_host_name_stays_out():
    assert "secret-host" not in str(asdict(report(*full_study())))


def test_versions_of_packages_that_are_not_installed_are_left_out():
    names = [name for name, _ in report(*full_study()).method.versions]
    assert names == ["torch", "torchtitan", "torchao", "python", "driver", "cuda"]


@given(low=st.floats(-1e5, 1e5), width=st.floats(1e-2, 1e5))
def test_ticks_are_few_round_and_inside(low, width):
    scale = Scale(low, low + width)
    assume(scale.high > scale.low)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 6
    slack = 1e-9 * (abs(low) + width)
    assert all(scale.low - slack <= t <= scale.high + slack for t in ticks)


@given(values=st.lists(st.floats(0.1, 1e6), min_size=1, max_size=20))
def test_every_value_has_its_place_on_the_axis(values):
    scale = Scale.around(*values)
    assert all(0.0 < scale.share(value) < 1.0 for value in values)
